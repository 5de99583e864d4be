"""A home keeps to what it holds."""

from pathlib import Path

import pytest

from codec import Manifest
from codec.errors import UsageError
from codec.shards import Shard
from codec.sign import Key
from node.member.held_shard import keep_to
from swarm.store import Seal, Store

KEY = Key(bytes([3]) * 32)
SHARD = Shard(4, (1,))


def seal_version(store: Store) -> None:
    manifest = Manifest(KEY.public, 0, 0, 0, bytes(32), bytes(32), bytes(32), (), 0, 0)
    store.seal(Seal.of(manifest, manifest.seal(KEY)))


@pytest.mark.parametrize(
    ("held", "wanted"), [(SHARD, None), (None, SHARD), (SHARD, Shard(4, (2,))), (SHARD, Shard(8, (1,)))]
)
def test_a_home_holds_what_it_held_at_first(tmp_path: Path, held: Shard | None, wanted: Shard | None) -> None:
    with Store(tmp_path / "swarm", KEY.public) as store:
        keep_to(store, held)
        keep_to(store, held)
        with pytest.raises(UsageError, match="--home"):
            keep_to(store, wanted)
        keep_to(store, held)


def test_a_home_of_a_release_before_shards_holds_the_whole_model(tmp_path: Path) -> None:
    with Store(tmp_path / "swarm", KEY.public) as store:
        seal_version(store)
        with pytest.raises(UsageError, match="the whole model"):
            keep_to(store, SHARD)
        keep_to(store, None)
