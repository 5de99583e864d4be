"""Adapters as versions of their own, over a real Unix socket, to a seed whose nodes are a second replica."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_kit import (
    BASE,
    MODULES,
    adapter,
    adapters_of,
    assert_adapter,
    base_weights,
    blocks_of_slot,
    saved,
    seed_with_slots,
)
from seed_kit import FakeSeed, random_replica, running

from codec.adapter import AdapterConfig, AdapterModule
from codec.errors import UsageError
from codec.parts import BASE as BASE_PART
from codec.parts import Part, part_root
from codec.staging import block_hash
from node import Swarm
from node.trainers.adapter_messages import AdapterRemoved
from node.trainers.errors import PublishFailed, SwarmDown
from node.trainers.publish_adapter import list_adapters, publish_adapter, remove_adapter
from swarm.transport.base import Unreachable

torch.set_num_threads(1)


def remove_once_free(home: Path, name: str) -> AdapterRemoved:
    """The seed hears of a trainer's end a moment later."""
    for _ in range(1000):
        with contextlib.suppress(UsageError):
            return remove_adapter(home, name)
        time.sleep(0.02)
    return remove_adapter(home, name)


def until(done: Any, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_adapter_is_published_as_a_version_that_changes_only_its_slot(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(home=tmp_path) as swarm:
        seed = there.seed
        for version in (1, 2, 3):
            before = seed.replica.hashes.copy()
            source = adapter(version)
            publication = swarm.publish(source, step=10 * version, adapter="a").wait(timeout_s=30)
            assert (publication.epoch, publication.version) == (0, version)
            assert (publication.adapter, publication.adapter_version) == ("a", version)
            assert publication.root == seed.receiver.root
            assert_adapter(seed, "a", version, source)
            changed = np.flatnonzero((before != seed.replica.hashes).any(axis=1))
            assert set(changed) == set(blocks_of_slot(seed, 0))
            assert seed.sealed_parts[-1] == {Part.adapter(0)}
            assert publication.density == pytest.approx(1.0, abs=0.02 if version == 1 else 0.5), (
                "a share of the adapter, not of its slot"
            )
        assert swarm.head == (0, 3)
        assert swarm.state["head"] == (0, 3)
        assert seed.abandoned == 0


def test_one_process_trains_the_base_and_adapters(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(base_weights(0), home=tmp_path) as swarm:
        published = [
            swarm.publish(base_weights(1), step=1),
            swarm.publish(adapter(1), step=1, adapter="a"),
            swarm.publish(adapter(2), step=1, adapter="b"),
            swarm.publish(base_weights(2), step=2),
            swarm.publish(adapter(3), step=2, adapter="a"),
        ]
        for publication in published:
            publication.wait(timeout_s=30)
        assert sorted(publication.version or 0 for publication in published) == [1, 2, 3, 4, 5]
        assert_adapter(there.seed, "a", 2, adapter(3))
        assert_adapter(there.seed, "b", 1, adapter(2))
        replica = there.seed.receiver
        expected = random_replica(BASE)
        for tensor in BASE.tensors:
            want = base_weights(2)[tensor.name].contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)
            assert np.array_equal(replica.bits(tensor.name), want)
        assert part_root(replica.layout, replica.hashes, BASE_PART) != expected.root
        assert swarm.head == (0, 5)


@pytest.mark.parametrize("slots", [True, False])
def test_a_new_base_is_coded_only_where_every_member_can_read_new_values(tmp_path: Path, slots: bool) -> None:
    seed = seed_with_slots() if slots else FakeSeed(random_replica(BASE))
    fresh = {spec.name: torch.full(spec.shape, 0.25, dtype=torch.bfloat16) for spec in BASE.tensors}
    for weights in fresh.values():
        weights.view(-1)[::3] *= -3
    with running(tmp_path, seed), Swarm.attach(base_weights(0), home=tmp_path) as swarm:
        swarm.publish(fresh, step=1).wait(timeout_s=30)
    entries = [entry for entry, _ in seed.payloads.values()]
    assert len(entries) == len(BASE.tensors)
    sizes = [(entry.length, BASE.block(entry.block).nbytes) for entry in entries]
    assert all(length < nbytes if slots else length == nbytes for length, nbytes in sizes)


def test_a_step_that_changes_one_module_does_not_resend_the_others(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()), Swarm.attach(home=tmp_path) as swarm:
        config, tensors = adapter(1)
        swarm.publish((config, tensors), step=1, adapter="a").wait(timeout_s=30)
        tensors["base_model.model.layers.0.up.lora_B.weight"][0, 0] += 1.0
        second = swarm.publish((config, tensors), step=2, adapter="a").wait(timeout_s=30)
        assert second.changed == 2, "the element, and the adapter's version in its configuration"


def test_rank_and_modules_may_change_and_what_was_is_gone(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(home=tmp_path) as swarm:
        for version, source in enumerate(
            (adapter(1, rank=8), adapter(2, rank=2, modules={"layers.0.up": (48, 32)})), 1
        ):
            swarm.publish(source, step=version, adapter="a").wait(timeout_s=30)
            assert_adapter(there.seed, "a", version, source)


def test_what_does_not_fit_is_refused_before_a_version_is_begun(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots(rank=8)) as there, Swarm.attach(home=tmp_path) as swarm:
        with pytest.raises(UsageError, match="--adapter-rank 16"):
            swarm.publish(adapter(1, rank=16), step=1, adapter="a")
        with pytest.raises(UsageError, match=r"of another base: its layers\.0\.up is 48 x 64"):
            swarm.publish(adapter(1, modules={"layers.0.up": (48, 64)}), step=1, adapter="a")
        with pytest.raises(UsageError, match="no linear layer of this swarm's base"):
            swarm.publish(adapter(1, modules={"embed": (64, 32)}), step=1, adapter="a")
        with pytest.raises(UsageError, match="1 to 64 of the characters"):
            swarm.publish(adapter(1), step=1, adapter="a/b")
        assert there.seed.attempts == []
        swarm.publish(adapter(1), step=1, adapter="a").wait(timeout_s=30)


def test_a_swarm_without_slots_says_which_flag_it_lacks(tmp_path: Path) -> None:
    seed = FakeSeed(random_replica(BASE))
    with running(tmp_path, seed), Swarm.attach(home=tmp_path) as swarm, pytest.raises(UsageError, match="--adapters 8"):
        swarm.publish(adapter(1), step=1, adapter="a")


def test_two_processes_each_with_an_adapter_take_turns(tmp_path: Path) -> None:
    """Neither is refused while the other publishes, and neither's versions are lost."""
    with running(tmp_path, seed_with_slots()) as there:

        def train(name: str, first: int) -> None:
            with Swarm.attach(home=tmp_path) as swarm:
                for step in range(6):
                    swarm.publish(adapter(first + step), step=step, adapter=name, timeout_s=30)
                    time.sleep(0.002)

        threads = [threading.Thread(target=train, args=(name, 100 * i)) for i, name in enumerate("abc", 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert there.seed.head == (0, 18)
        assert there.seed.abandoned == 0
        for i, name in enumerate("abc", 1):
            assert_adapter(there.seed, name, 6, adapter(100 * i + 5))


def test_an_adapter_is_published_from_one_process(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(home=tmp_path) as two:
        with Swarm.attach(home=tmp_path) as one:
            one.publish(adapter(1), step=1, adapter="new").wait(timeout_s=30)
            with pytest.raises(PublishFailed, match="Another process publishes the adapter 'new'"):
                two.publish(adapter(2), step=1, adapter="new")
            two.publish(adapter(3), step=1, adapter="other").wait(timeout_s=30)
        two.publish(adapter(2), step=1, adapter="new").wait(timeout_s=30)  # the first process has closed
        assert_adapter(there.seed, "new", 2, adapter(2))


def test_two_processes_that_name_the_same_new_adapter_at_once(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there:
        outcomes: list[Any] = []
        swarms = [Swarm.attach(home=tmp_path) for _ in range(4)]

        def publish(i: int) -> None:
            try:
                outcomes.append(swarms[i].publish(adapter(i), step=1, adapter="new").wait(timeout_s=30).version)
            except PublishFailed as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=publish, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(outcome == 1 for outcome in outcomes) == 1
        assert sum("Another process" in str(outcome) for outcome in outcomes) == 3
        assert set(adapters_of(there.seed)) == {"new"}
        for swarm in swarms:
            swarm.close()


def test_a_trainer_that_ends_in_the_middle_frees_the_queue(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(home=tmp_path) as two:
        two.publish(adapter(1), step=1, adapter="b").wait(timeout_s=30)
        one = Swarm.attach(home=tmp_path)
        there.pause()
        lost = one.publish(adapter(2), step=1, adapter="a")
        until(lambda: len(there.seed.attempts) == 2)
        waiting = two.publish(adapter(3), step=2, adapter="b")
        time.sleep(0.3)
        assert waiting.version is None, "it waits for its turn, and is not refused"
        one._lines.adapter("a", 1, 1.0).line._sender.give_up()  # its connection ends, as when its process is killed
        there.resume()
        waiting.wait(timeout_s=30)
        assert lost.error is not None, "nobody heard of its end"
        assert_adapter(there.seed, "b", 2, adapter(3))
        one.close(1.0)


def test_slots_run_out_and_are_given_back(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots(count=2)) as there, Swarm.attach(home=tmp_path) as swarm:
        swarm.publish(adapter(1), step=1, adapter="a").wait(timeout_s=30)
        with Swarm.attach(home=tmp_path) as other:
            other.publish(adapter(2), step=1, adapter="b").wait(timeout_s=30)
            with pytest.raises(UsageError, match=r"All 2 slots for adapters are in use \(a, b\).*remove-adapter"):
                swarm.publish(adapter(3), step=1, adapter="c")
            with pytest.raises(UsageError, match="A trainer publishes the adapter 'b'"):
                remove_adapter(tmp_path, "b")
        removed = remove_once_free(tmp_path, "b")
        assert (removed.epoch, removed.version) == (0, 3)
        assert removed.root == there.seed.receiver.root
        assert set(adapters_of(there.seed)) == {"a"}
        with pytest.raises(UsageError, match=r"no adapter 'b'; it has: a\."):
            remove_adapter(tmp_path, "b")
        swarm.publish(adapter(3), step=1, adapter="c").wait(timeout_s=30)
        assert_adapter(there.seed, "c", 1, adapter(3))
        assert adapters_of(there.seed)["c"][0] == 1


def test_the_65th_adapter_is_refused(tmp_path: Path) -> None:
    seed = seed_with_slots(count=64, rank=4)
    modules = tuple(AdapterModule(name, 4) for name in sorted(MODULES))
    for slot in range(64):
        config = AdapterConfig(f"a{slot:02}", BASE.hash, 4, 8.0, modules, {}, 1).to_bytes()
        block = blocks_of_slot(seed, slot)[0]
        for replica in (seed.replica, seed.receiver):
            replica.write_block(block, config, block_hash(np.frombuffer(config, np.uint8)))
    with running(tmp_path, seed), Swarm.attach(home=tmp_path) as swarm:
        wanted = (
            r"All 64 slots .* in use \(a00, a01, .*, a07, \.\.\.\)\. Remove one \(swarm-node remove-adapter NAME\)\.$"
        )
        with pytest.raises(UsageError, match=wanted):
            swarm.publish(adapter(1), step=1, adapter="a64")
        remove_adapter(tmp_path, "a17")
        swarm.publish(adapter(1), step=1, adapter="a64").wait(timeout_s=30)
        assert adapters_of(seed)["a64"][0] == 17


def test_the_name_of_a_removed_adapter_begins_anew(tmp_path: Path) -> None:
    """Its first version has the number 1 again, and nothing of the adapter that had the name before."""
    with running(tmp_path, seed_with_slots()) as there:
        for round_ in (1, 2):
            with Swarm.attach(home=tmp_path) as swarm:
                for version in (1, 2):
                    source = adapter(10 * round_ + version, rank=8 if round_ == 1 else 2)
                    found = swarm.publish(source, step=version, adapter="a").wait(timeout_s=30)
                    assert found.adapter_version == version
                    assert_adapter(there.seed, "a", version, source)
            assert remove_once_free(tmp_path, "a").version == 3 * round_
        assert adapters_of(there.seed) == {}


def test_a_name_that_was_never_published_keeps_its_slot_until_another_needs_it(tmp_path: Path) -> None:
    seed = seed_with_slots(count=2)
    with running(tmp_path, seed) as there, Swarm.attach(home=tmp_path) as swarm:
        with pytest.raises(UsageError, match="--adapter-rank"):  # it has a slot, and no version of it
            swarm.publish(adapter(1, rank=64), step=1, adapter="typo")
        swarm.publish(adapter(2), step=1, adapter="b").wait(timeout_s=30)
        assert adapters_of(there.seed)["b"][0] == 1
    with running(tmp_path, seed) as there, Swarm.attach(home=tmp_path) as swarm:
        swarm.publish(adapter(1), step=1, adapter="typo").wait(timeout_s=30)
        assert adapters_of(seed)["typo"][0] == 0, "as before the restart"
    with running(tmp_path, seed), Swarm.attach(home=tmp_path) as swarm:
        remove_once_free(tmp_path, "typo")
        seed.records.put([("adapter-slot/gone", b"0")])
        swarm.publish(adapter(4), step=1, adapter="c").wait(timeout_s=30)
        assert adapters_of(seed)["c"][0] == 0
        assert "adapter-slot/gone" not in seed.records.held


def test_a_restart_of_the_seed_in_the_middle_of_an_adapters_version(tmp_path: Path) -> None:
    seed = seed_with_slots()
    with running(tmp_path, seed) as there:
        swarm = Swarm.attach(home=tmp_path)
        swarm.publish(adapter(1), step=1, adapter="a").wait(timeout_s=30)
        there.pause()
        second = swarm.publish(adapter(2), step=2, adapter="a")
        third = swarm.publish(adapter(3), step=3, adapter="a")
        until(lambda: len(seed.attempts) == 2)
    seed.slow.set()
    seed.staged, seed.chunks = [], []
    with running(tmp_path, seed):
        assert second.wait(timeout_s=30).version == 2
        assert third.wait(timeout_s=30).version == 3
        assert_adapter(seed, "a", 3, adapter(3))
        swarm.close()


def test_the_answer_to_a_version_was_lost_and_others_have_published_since(tmp_path: Path) -> None:
    """The trainer hears at its next connection that its version was sealed, and everything about it."""
    seed, homes = seed_with_slots(), [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
    with running(homes[0], seed) as there:
        swarm = Swarm.attach(home=homes[0])
        swarm.publish(adapter(1), step=1, adapter="a").wait(timeout_s=30)

        def end_before_the_answer(head: Any) -> None:
            there._scope.cancel()

        there.call(lambda: setattr(seed, "on_sealed", end_before_the_answer))
        second = swarm.publish(adapter(2), step=2, adapter="a")
        until(lambda: seed.head == (0, 2))
    root, manifest = seed.replica.root, seed.manifests[-1]
    with running(homes[1], seed), Swarm.attach(home=homes[1]) as other:  # where the first trainer does not look
        other.publish(adapter(3), step=1, adapter="b").wait(timeout_s=30)
    with running(homes[0], seed):
        second.wait(timeout_s=30)
        assert (second.version, second.root, second.adapter_version) == (2, root, 2)
        assert (second.bytes, second.changed) == (manifest.payload_bytes, manifest.changed)
        assert second.density == pytest.approx(1.0, abs=0.5)
        assert swarm.publish(adapter(4), step=3, adapter="a").wait(timeout_s=30).version == 4
        assert_adapter(seed, "a", 3, adapter(4))
        swarm.close()


def test_coalesce_replaces_the_adapters_version_that_waits(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(home=tmp_path) as swarm:
        swarm.publish(adapter(0), step=0, adapter="a").wait(timeout_s=30)
        there.pause()
        first = swarm.publish(adapter(1), step=1, adapter="a")
        until(lambda: len(there.seed.attempts) == 2)
        second = swarm.publish(adapter(2), step=2, adapter="a", on_busy="coalesce")
        third = swarm.publish(adapter(3), step=3, adapter="a", on_busy="coalesce")
        there.resume()
        assert second.wait(timeout_s=30).superseded
        assert [first.wait(timeout_s=30).adapter_version, third.wait(timeout_s=30).adapter_version] == [2, 3]
        assert_adapter(there.seed, "a", 3, adapter(3))


def test_a_rollback_of_the_swarm_takes_its_adapters_along(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(home=tmp_path) as swarm:
        roots = [swarm.publish(adapter(v), step=v, adapter="a").wait(timeout_s=30).root for v in (1, 2, 3)]
        assert roots[0] is not None
        assert swarm.resume(roots[0]) == (1, 1)
        assert_adapter(there.seed, "a", 1, adapter(1))
        after = swarm.publish(adapter(4), step=4, adapter="a").wait(timeout_s=30)
        assert (after.epoch, after.version, after.adapter_version) == (1, 2, 2)
        assert_adapter(there.seed, "a", 2, adapter(4))


def test_after_close_nothing_is_published(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()):
        swarm = Swarm.attach(home=tmp_path)
        swarm.close()
        with pytest.raises(SwarmDown, match="closed"):
            swarm.publish(adapter(1), step=1, adapter="a")


def test_the_command_publishes_a_folder_of_peft(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with running(home, seed_with_slots()) as there:
        for version in (1, 2):
            folder = saved(tmp_path / f"step_{version}", adapter(version))
            report = publish_adapter(home, folder, "a", step=version)
            assert (report["adapter"], report["adapter_version"], report["version"]) == ("a", version, version)
            assert report["root"] == there.seed.receiver.root.hex()
            assert_adapter(there.seed, "a", version, adapter(version))
        found = list_adapters(home)
        assert (found.slots, found.rank) == (3, 8)
        assert [(row.name, row.slot, row.version, row.rank, row.modules) for row in found.adapters] == [
            ("a", 0, 2, 4, 2)
        ]
        with pytest.raises(UsageError, match=r"has no adapter_config\.json"):
            publish_adapter(home, tmp_path, "a")
        with pytest.raises(UsageError, match="characters"):
            publish_adapter(home, folder, "a/b")
        assert remove_once_free(home, "a").version == 3
    with pytest.raises(Unreachable):
        publish_adapter(home, folder, "a")
    with pytest.raises(Unreachable):
        remove_adapter(home, "a")
