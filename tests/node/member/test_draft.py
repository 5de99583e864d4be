"""The swarm's draft model at a node: whether its engines load it, why not, and its folder."""

from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import pytest
from msgspec import UNSET
from structlog.testing import capture_logs

from codec import FileSpec, Layout, Replica, TensorSpec
from codec.adapter import AdapterSlots
from codec.parts import DRAFT, extended, part_root
from node.member.draft import NodeDraft
from node.settings.config import JoinConfig

BASE = Layout((TensorSpec("layers.0.up.weight", "BF16", (64, 64)),))
HEAD = Layout((TensorSpec("fc.weight", "BF16", (8, 8)),), (FileSpec("config.json", 2, b"h" * 32),))
LAYOUT = extended(BASE, draft=HEAD)


def draft_at(home: Path, layout: Layout = LAYOUT, **settings: Any) -> NodeDraft:
    config = JoinConfig(home=home, **({"engine": "vllm"} | settings))
    store: Any = Space(file={b"h" * 32: b"{}"}.get)
    model: Any = Space(replica=Replica.create(layout), layout=layout)
    return NodeDraft(config, store, model, ())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"engine": "transformers"}, "the engine transformers does not propose tokens by one"),
        ({"draft_tokens": 0}, "--draft-tokens is 0"),
        ({"engine_url": ("http://127.0.0.1:8000",)}, "run yourself"),
        ({"replica": "engine"}, "--replica engine"),
        ({"format": ("int4-group-e8",)}, "format"),
    ],
)
def test_the_log_says_once_why_a_draft_is_not_loaded(tmp_path: Path, settings: Any, why: str) -> None:
    draft = draft_at(tmp_path, **settings)
    with capture_logs() as logs:
        assert not draft.loaded(LAYOUT)
        assert draft.folder(LAYOUT) is None
    (line,) = logs
    assert line["event"] == "draft_not_loaded"
    assert why in line["why"]


def test_engines_that_serve_adapters_load_no_draft(tmp_path: Path) -> None:
    layout = extended(BASE, AdapterSlots.reserve(BASE, 1, 4), HEAD)
    draft = draft_at(tmp_path, layout)
    with capture_logs() as logs:
        assert not draft.loaded(layout)
    assert "adapters" in logs[0]["why"]


def test_a_swarm_without_a_draft_has_nothing_to_say(tmp_path: Path) -> None:
    draft = draft_at(tmp_path, BASE)
    with capture_logs() as logs:
        assert not draft.loaded(BASE)
        assert draft.status() is UNSET
    assert logs == []


def test_the_drafts_own_files_are_in_its_folder(tmp_path: Path) -> None:
    draft = draft_at(tmp_path)
    with capture_logs() as logs:
        folder = draft.folder(LAYOUT)
    assert logs == []
    assert folder is not None
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"config.json": b"{}"}


def test_status(tmp_path: Path) -> None:
    draft = draft_at(tmp_path)
    draft.note([DRAFT])
    draft.note([])
    found: Any = draft.status()
    replica = Replica.create(LAYOUT)
    assert found.root == part_root(LAYOUT, replica.hashes, DRAFT).hex()
    assert (found.versions, found.weights_bytes, found.loaded, found.acceptance) == (1, 128, True, None)
