"""A bundle proves who answered what, with which weights; every change of it is found."""

from typing import Any

import msgspec
import pytest
from ledger_kit import ALICE, KEY_OF, PROMPT, SAMPLING, group_id

from codec import Layout, Manifest, TensorSpec
from codec.errors import PeerError
from codec.sign import Key
from node.engines.base import SamplingParams, Span
from node.ledger.bundle import MAX_BUNDLE_BYTES, SampleBundle
from node.ledger.messages import Rollout, VersionSpan, seal_rollout, work_hash
from node.ledger.packing import pack_floats, pack_tokens

AUTHORITY = Key(b"a" * 32)
LAYOUT = Layout((TensorSpec("w", "BF16", (4, 4)),))
ROOTS = {3: b"3" * 32, 4: b"4" * 32}


def manifest(version: int, **changes: Any) -> Manifest:
    fields = {
        "swarm": AUTHORITY.public,
        "epoch": 0,
        "version": version,
        "attempt": 0,
        "parent_root": b"0" * 32,
        "root": ROOTS[version],
        "layout_hash": LAYOUT.hash,
        "chunk_ids": (b"c" * 32,),
        "payload_bytes": 10,
        "changed": 1,
    }
    return Manifest(**(fields | changes))


def rollout(**changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "lease": 1,
        "token": 1,
        "sample": 2,
        "work": work_hash(group_id(1), 2, PROMPT, SAMPLING),
        "token_ids": pack_tokens((8, 9, 2)),
        "logprobs": pack_floats((-0.5, 1e-4, -1.0)),
        "finish_reason": "stop",
        "spans": (VersionSpan(0, 3, ROOTS[3], 1), VersionSpan(0, 4, ROOTS[4], 3)),
    }
    return Rollout(**(fields | changes))


def bundle(**changes: Any) -> SampleBundle:
    made = SampleBundle.of(
        AUTHORITY.public, group_id(1), 2, PROMPT, SAMPLING, ALICE, seal_rollout(KEY_OF[ALICE], rollout()),
        tuple(manifest(version).seal(AUTHORITY) for version in ROOTS), LAYOUT.to_bytes(),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def test_a_bundle_is_read_back_and_opened() -> None:
    opened = SampleBundle.decode(bundle().encode()).open()
    assert opened.name == f"{group_id(1).hex()}/2"
    assert opened.answer.token_ids == (8, 9, 2)
    assert opened.answer.logprobs == (-0.5, 0.0, -1.0), "rounding put one above 0"
    assert opened.answer.spans == (Span((0, 3), 0, 1), Span((0, 4), 1, 3))
    assert {version: found.root for version, found in opened.manifests.items()} == {(0, 3): ROOTS[3], (0, 4): ROOTS[4]}


def signed(**changes: Any) -> dict[str, Any]:
    return {"rollout": seal_rollout(KEY_OF[ALICE], rollout(**changes))}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompt": pack_tokens((5, 6, 8))}, "another prompt"),
        ({"sampling": SamplingParams(max_tokens=4, stop_tokens=(2,), seed=10)}, "another prompt"),
        ({"group": group_id(7)}, "another prompt"),
        ({"sample": 1}, "another prompt"),
        ({"node": AUTHORITY.public}, "signature"),
        ({"rollout": b"x" * 80}, "signature"),
        ({"authority": ALICE}, "signature"),
        ({"seals": (manifest(3).seal(AUTHORITY),)}, "0, 4.* missing"),
        ({"seals": tuple(manifest(v, root=b"9" * 32).seal(AUTHORITY) for v in ROOTS)}, "other weights"),
        ({"seals": tuple(manifest(v, layout_hash=b"9" * 32).seal(AUTHORITY) for v in ROOTS)}, "layout"),
        ({"layout": b"no layout"}, "layout"),
        ({"prompt": b"", **signed(work=work_hash(group_id(1), 2, b"", SAMPLING))}, "a prompt"),
        (signed(logprobs=pack_floats((-0.5,))), "log-probability for each token"),
    ],
)
def test_what_was_changed_is_found(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PeerError, match=why):
        bundle(**changes).open()


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xff" * 40, bundle(kind="swarm-node sample 9").encode()])
def test_other_files_are_no_bundles(data: bytes) -> None:
    with pytest.raises(PeerError, match="sample"):
        SampleBundle.decode(data)


def test_a_file_over_the_bound_is_not_decoded() -> None:
    with pytest.raises(PeerError, match="at most"):
        SampleBundle.decode(bytes(MAX_BUNDLE_BYTES + 1))
