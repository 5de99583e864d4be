"""`EngineHost` and `EngineGroup` give adapters to engines, again after each restart, and serve only what is proven."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import trio
from engine_kit import NodeReplica, engine

from codec.adapter import AdapterConfig, AdapterModule, AdapterSlots
from node.engines.base import Completion, Prompt, SamplingParams
from node.engines.group import EngineGroup
from node.engines.host import EngineFailed, EngineHost, EngineLost
from node.engines.messages import AdapterProof
from scenarios.engines.adapter_models import MadeAdapter

SAMPLING = SamplingParams(max_tokens=4, stop_tokens=(2,))
ELEMENTS = 4096


def made(node: NodeReplica, name: str = "a", seed: int = 0, rank: int = 4) -> MadeAdapter:
    config = AdapterConfig(name, node.replica.layout.hash, rank, 8.0, (AdapterModule("c", rank),), {}, seed)
    bits = np.random.default_rng(seed).integers(0, 1 << 16, ELEMENTS, np.uint16)
    return MadeAdapter(node.replica.layout, config, bits)


async def give(host: Any, adapter: MadeAdapter, slot: int, version: int) -> float | None:
    with adapter.memory() as fd:
        return await host.set_adapter(slot, adapter.config, fd, (0, version), adapter.root(slot))


async def ask(host: Any, adapter: str = "") -> Completion:
    completions, _ = await host.generate([Prompt((1, 2))], SAMPLING, None, adapter)
    return completions[0]


async def test_versions_of_an_adapter_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        base = (await ask(host)).token_ids
        seen = {base}
        for version in (3, 5, 9):
            adapter = made(node, seed=version)
            assert await give(host, adapter, 2, version) == 0.002
            assert host.adapters == {"a": (0, version)}
            assert await host.prove_adapter(2) == adapter.root(2)
            found = await ask(host, "a")
            assert {span.version for span in found.spans} == {(0, version)}
            seen.add(found.token_ids)
        assert len(seen) == 4
        assert (await ask(host)).token_ids == base
        await host.drop_adapter(2)
        assert host.adapters == {}
        score = partial(host.score, (1,), (2,), SAMPLING, "a")
        for call in (lambda: ask(host, "a"), lambda: host.prove_adapter(2), score):
            with pytest.raises(EngineFailed):
                await call()


async def test_a_restarted_engine_gets_its_adapters_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        adapters = [made(node, "a", 1), made(node, "b", 2)]
        for slot, adapter in enumerate(adapters):
            await give(host, adapter, slot, 3 + slot)
        newer = made(node, "b", 5)
        await give(host, newer, 1, 7)
        before = await ask(host, "b")
        (tmp_path / "die").touch()
        with pytest.raises(EngineLost):
            await ask(host)
        later = made(node, "c", 6)
        assert await give(host, later, 2, 8) is None, "the engine is not ready, and gets it once it is"
        await host.wait_ready()
        assert host.restarts == 1
        assert host.adapters == {"a": (0, 3), "b": (0, 7), "c": (0, 8)}
        assert await ask(host, "b") == before
        assert await host.prove_adapter(1) == newer.root(1)
        assert await host.prove_adapters()
        await host.reload()
        assert host.adapters == {"a": (0, 3), "b": (0, 7), "c": (0, 8)}
        assert await host.prove_adapter(2) == later.root(2)


async def test_what_the_engine_refuses_is_not_served_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        with pytest.raises(EngineFailed, match="--rank 8"):
            await give(host, made(node, rank=7), 0, 3)
        assert host.adapters == {}
        good = made(node, seed=1)
        with good.memory() as fd, pytest.raises(EngineFailed, match="not those of its version"):
            await host.set_adapter(0, good.config, fd, (0, 3), b"x" * 32)
        await give(host, good, 0, 3)
        assert (await ask(host, "a")).spans[0].version == (0, 3)
        with pytest.raises(EngineFailed, match="--rank 8"):
            await give(host, made(node, rank=7), 0, 4)
        assert host.adapters == {"a": (0, 3)}, "the version before is still served"
        await host.reload()
        assert host.ready
        assert host.adapters == {}, "what the engine refuses is not served after a restart either"


async def test_an_engine_that_proves_other_bits_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        (tmp_path / "liar").touch()
        with pytest.raises(EngineFailed, match="not what was given"):
            await give(host, made(node), 0, 3)
        assert host.adapters == {}
        with pytest.raises(EngineFailed):
            await ask(host, "a")


async def test_an_adapters_bits_that_changed_are_found_by_a_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        await give(host, made(node), 0, 3)
        group = EngineGroup([host])
        assert await group.prove() == (node.replica.root, True)
        (tmp_path / "flip").touch()
        assert await group.prove() == (node.replica.root, False)
        await give(host, made(node, "z", 4), 0, 4)  # another adapter in its slot
        assert host.adapters == {"z": (0, 4)}
        assert await group.prove() == (node.replica.root, True)


async def test_slots_are_part_of_the_attachment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeReplica(tmp_path)

    async def source() -> Any:
        return replace(node.ref, slots=AdapterSlots(3, 16, ELEMENTS))

    async with engine(tmp_path, node, monkeypatch, source) as host:
        adapter = made(node)
        await give(host, adapter, 1, 2)
        assert await host.prove_adapter(1) == adapter.root(1)


class Fake:
    """A host that serves some adapters."""

    def __init__(self, name: str, **adapters: int) -> None:
        self.name, self.version, self.ready = name, (0, 1), True
        self.adapters = {adapter: (0, version) for adapter, version in adapters.items()}
        self.roots: dict[int, bytes] = {}
        self.fails = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def generate(
        self, prompts: Any, sampling: Any, counts: Any = None, adapter: str = "", draws: Any = None
    ) -> Any:
        return [f"{self.name}:{adapter}"] * len(prompts), 1.0

    async def set_adapter(self, slot: int, config: AdapterConfig, fd: int, version: Any, root: bytes) -> float | None:
        if self.fails:
            raise EngineFailed("no", poisoned=False)
        self.adapters[config.name], self.roots[slot] = version, root
        return 0.5 if self.ready else None

    async def drop_adapter(self, slot: int) -> None:
        self.roots.pop(slot, None)

    async def prove_adapter(self, slot: int) -> bytes:
        return self.roots[slot]


async def test_a_group_gives_adapters_to_all_and_asks_those_that_hold_the_newest(tmp_path: Path) -> None:
    a, b, away = Fake("one", x=4), Fake("two", x=5, y=2), Fake("away")
    away.ready = False
    group = EngineGroup(cast(list[EngineHost], [a, b, away]))
    async with trio.open_nursery() as nursery:
        await nursery.start(group.run)
        assert group.adapters == {"x": (0, 5), "y": (0, 2)}
        for name in ("x", "y"):
            for _ in range(3):
                made_by, _ = await group.generate([Prompt((1,))], SAMPLING, None, name)
                assert made_by == [f"two:{name}"]
        node = NodeReplica(tmp_path)
        adapter = made(node, "z")
        assert await give(group, adapter, 3, 6) == 0.5
        assert a.roots == b.roots == away.roots == {3: adapter.root(3)}
        assert await group.prove_adapter(3) == adapter.root(3)
        b.roots[3] = b"other"
        assert await group.prove_adapter(3) == b""
        a.fails = True
        assert await give(group, adapter, 3, 7) == 0.5, "one host serves it"
        made_by, _ = await group.generate([Prompt((1,))], SAMPLING, None, "z")
        assert made_by == ["two:z"], "the other one has the version before"
        b.ready = False
        assert "z" not in group.adapters, "nothing may be named by a version that did not draw it"
        b.ready, b.fails, away.fails = True, True, True
        with pytest.raises(EngineFailed):
            await give(group, adapter, 3, 8)
        await group.drop_adapter(3)
        assert a.roots == b.roots == away.roots == {}
        a.ready = b.ready = False
        with pytest.raises(EngineLost):
            await group.prove_adapter(3)
        nursery.cancel_scope.cancel()


def test_an_answer_has_a_root_of_32_bytes() -> None:
    data = msgspec.msgpack.encode(AdapterProof(1, b"short"))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=AdapterProof)
