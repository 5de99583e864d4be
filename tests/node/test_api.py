"""The trainer's API over a real Unix socket, to a seed whose nodes are a second replica.

Published bits are compared exactly, and the seed is slow, busy, down or restarted.
"""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from seed_kit import LAYOUT, FakeSeed, random_replica, running

from codec import Layout, Replica, TensorSpec
from codec.chunk import CODER_PCO, CODER_RICE
from codec.errors import UsageError
from node import SamplingParams, Swarm
from node.engines.base import OPTIONS, SamplingOptions
from node.ipc.channel import ChannelTimeout
from node.ledger.messages import Abilities, encode
from node.ledger.packing import pack_floats, pack_tokens
from node.status.schema import MemberStatus, SeedStatus
from node.trainers.api import Check, Rollout
from node.trainers.connection import patience, seedwatch
from node.trainers.errors import PromptRefused, PublishFailed, SwarmBusy, SwarmDown, SwarmTimeout
from node.trainers.messages import OpenRollouts, Room, Sample, Taken
from node.trainers.rollouts import _Batch, _Prompt, group_id
from swarm.store.disk import DiskFull

torch.set_num_threads(1)
SAMPLING = SamplingParams(max_tokens=4, stop_tokens=(2,))


def weights(version: int) -> dict[str, torch.Tensor]:
    """Version `version` of the model, with float32 masters of `a`. About 1 % differs from the version before."""
    replica = random_replica()
    tensors = {}
    for tensor in LAYOUT.tensors:
        bits = replica.bits(tensor.name).copy()
        for v in range(1, version + 1):
            bits[v % 3 :: 97] += 1
        kind = torch.bfloat16 if tensor.dtype == "BF16" else torch.float32
        tensors[tensor.name] = torch.from_numpy(bits.view(np.uint8)).view(kind).view(tensor.shape)
    tensors["a.weight"] = tensors["a.weight"].float()
    tensors["tied.weight"] = tensors["c.weight"]
    return tensors


def assert_holds(seed: FakeSeed, version: int) -> None:
    expected = weights(version)
    for tensor in LAYOUT.tensors:
        kind = torch.bfloat16 if tensor.dtype == "BF16" else torch.float32
        want = expected[tensor.name].to(kind).contiguous().reshape(-1).view(torch.uint8).numpy()
        for replica in (seed.receiver, seed.replica):
            assert np.array_equal(replica.bits(tensor.name).view(np.uint8), want), tensor.name
    assert seed.receiver.rehash() == []


@pytest.mark.slow
def test_published_bits_are_the_nodes_bits(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(weights(0), home=tmp_path) as swarm:
        for version in (1, 2, 3):
            publication = swarm.publish(weights(version), step=10 * version).wait(timeout_s=30)
            assert_holds(there.seed, version)
            assert (publication.epoch, publication.version) == (0, version)
            assert publication.root == there.seed.receiver.root
            assert publication.sealed
            assert publication.bytes == there.seed.manifests[-1].payload_bytes > 0
            assert publication.changed == there.seed.manifests[-1].changed
            assert publication.density == pytest.approx(1 / 97, rel=0.01)
            assert set(publication.seconds) == {"wait", "copy", "queue", "encode", "seal"}
        assert swarm.state["head"] == (0, 3)
        assert there.seed.abandoned == 0


@pytest.mark.slow
def test_the_seed_chooses_the_coder(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(weights(0), home=tmp_path) as swarm:
        for version, coder in ((1, CODER_PCO), (2, CODER_RICE)):
            there.seed.coders.clear()
            there.seed.next_coder = coder
            swarm.publish(weights(version), step=version).wait(timeout_s=30)
            assert_holds(there.seed, version)
            assert there.seed.coders == {coder}


def test_publish_returns_once_copied_and_the_tensors_may_change(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        there.pause()
        tensors = weights(1)
        publication = swarm.publish(tensors.items(), step=1)
        for tensor in tensors.values():
            tensor.zero_()
        assert not publication.sealed
        with pytest.raises(SwarmTimeout, match="Step 1 was not sealed"):
            publication.wait(timeout_s=0.05)
        there.resume()
        publication.wait(timeout_s=30)
        assert_holds(there.seed, 1)


def test_a_module_is_published_with_its_ties_and_wrappers(tmp_path: Path):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.ParameterDict()

        def state_dict(self):
            return {f"module.{name}": tensor for name, tensor in weights(1).items()}

    with running(tmp_path) as there, Swarm.attach(Model(), home=tmp_path) as swarm:
        swarm.publish(Model(), step=1).wait(timeout_s=30)
        assert_holds(there.seed, 1)


def test_numpy_bits_need_no_torch(tmp_path: Path):
    replica = random_replica(seed=5)
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        pairs = [(t.name, replica.bits(t.name).reshape(t.shape)) for t in LAYOUT.tensors]
        swarm.publish(pairs, step=1).wait(timeout_s=30)
        assert there.seed.receiver.root == replica.root


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("b.bias"), "lacks b.bias"),
        (lambda w: w.update({"new.weight": torch.zeros(3)}), "new.weight that the base"),
        (lambda w: w.update({"b.bias": torch.zeros(8, dtype=torch.bfloat16)}), r"\(8,\) in the model"),
        (lambda w: w.update({"b.bias": torch.zeros(7, dtype=torch.float16)}), "float16"),
        (lambda w: w.update({"d.scale": torch.zeros((), dtype=torch.float64)}), "float64 in the model and F32"),
        (lambda w: w.update({"tied.weight": w["c.weight"] + 1}), "are tied"),
        (lambda w: w.update({"b.bias": np.zeros(7, np.float32)}), "give the bits"),
    ],
)
def test_another_model_is_refused_and_the_next_publish_works(tmp_path: Path, change, says):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        wrong = weights(1)
        change(wrong)
        with pytest.raises(UsageError, match=says):
            swarm.publish(wrong, step=1)
        swarm.publish(weights(1), step=1).wait(timeout_s=30)
        assert_holds(there.seed, 1)


def test_attaching_another_model_is_refused(tmp_path: Path):
    with running(tmp_path):
        wrong = weights(0)
        del wrong["b.bias"]
        with pytest.raises(UsageError, match=r"b\.bias"):
            Swarm.attach(wrong, home=tmp_path)
        with pytest.raises(UsageError, match=r"x\.weight"):
            Swarm.attach(weights(0) | {"x.weight": torch.zeros(1)}, home=tmp_path)


def test_at_most_two_publications_are_unsealed(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        there.pause()
        first = swarm.publish(weights(1), step=1)
        second = swarm.publish(weights(2), step=2)
        with pytest.raises(SwarmBusy):
            swarm.publish(weights(3), step=3, timeout_s=0.05)
        third = swarm.publish(weights(3), step=3, on_busy="coalesce")
        assert second.superseded
        second.wait(timeout_s=0)
        there.resume()
        third.wait(timeout_s=30)
        assert first.sealed
        assert (first.version, third.version) == (1, 2)
        assert_holds(there.seed, 3)


def test_wait_returns_at_the_quorum(tmp_path: Path):
    with running(tmp_path), Swarm.attach(home=tmp_path) as swarm:
        publication = swarm.publish(weights(1), step=1)
        publication.wait(quorum=0.3, timeout_s=30)
        with pytest.raises(SwarmTimeout, match="33%"):
            publication.wait(quorum=0.9, timeout_s=0.3)


def test_a_publish_survives_a_restart_of_the_seed(tmp_path: Path):
    seed = FakeSeed(random_replica())
    with running(tmp_path, seed) as there:
        swarm = Swarm.attach(home=tmp_path)
        swarm.publish(weights(1), step=1).wait(timeout_s=30)
        there.pause()
        publication = swarm.publish(weights(2), step=2)
        while not seed.attempts[1:]:
            time.sleep(0.01)
    assert seed.abandoned == 1
    assert "error" in swarm.state
    with running(tmp_path, seed) as there:
        there.resume()
        publication.wait(timeout_s=30)
        assert publication.version == 2
        assert [attempt.attempt for attempt in seed.attempts] == [0, 0, 1]
        assert_holds(seed, 2)
        swarm.close()


def test_a_seed_that_stays_down_is_a_typed_error_and_never_a_hang(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(seedwatch, "RECONNECT_S", 0.3)
    with running(tmp_path):
        swarm = Swarm.attach(home=tmp_path)
    for _ in range(2):
        with pytest.raises(SwarmDown, match=r"Step 1 was not published\. The seed of .* has ended"):
            swarm.publish(weights(1), step=1)
    with pytest.raises(SwarmDown):
        next(swarm.rollouts([[1]], 1, SAMPLING, timeout_s=0.3))
    swarm.close()
    with pytest.raises(SwarmDown, match="closed"):
        swarm.publish(weights(1), step=1)
    with pytest.raises(UsageError, match="swarm-node seed --base"):
        Swarm.attach(home=tmp_path)


def test_a_full_disk_at_the_seed_is_a_typed_error_and_training_goes_on(tmp_path: Path, monkeypatch):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:

        async def full(chunk: object, known: object) -> None:
            raise DiskFull("The disk is full.")

        with monkeypatch.context() as patched:
            patched.setattr(there.seed, "add_chunk", full)
            with pytest.raises(UsageError, match="disk is full"):
                swarm.publish(weights(1), step=1).wait(timeout_s=30)
        assert swarm.state["publish_error"] == "The disk is full."
        swarm.publish(weights(2), step=2).wait(timeout_s=30)
        assert_holds(there.seed, 2)


def test_close_gives_up_publications_that_are_not_sealed_in_time(tmp_path: Path):
    with running(tmp_path) as there:
        there.pause()
        swarm = Swarm.attach(home=tmp_path)
        publication = swarm.publish(weights(1), step=1)
        while not there.seed.attempts:
            time.sleep(0.01)
        with pytest.raises(SwarmTimeout, match=r"Step 1 was given up when the swarm was closed, after 0 s of waiting"):
            swarm.close(timeout_s=0.1)
        with pytest.raises(SwarmTimeout):
            publication.wait(timeout_s=10)
        swarm.close()
        there.resume()
        while not there.seed.abandoned and there.seed.head == (0, 0):  # or sealed, if all of it had been sent
            time.sleep(0.01)
        assert len(there.seed.attempts) == 1


def test_one_trainer_publishes_at_a_time(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as one, Swarm.attach(home=tmp_path) as two:
        there.pause()
        first = one.publish(weights(1), step=1)
        while not there.seed.attempts:
            time.sleep(0.01)
        with pytest.raises(PublishFailed, match="Another trainer"):
            two.publish(weights(2), step=1).wait(timeout_s=10)
        there.resume()
        first.wait(timeout_s=30)
        two.publish(weights(2), step=2).wait(timeout_s=30)  # diffs against the other trainer's version
        assert_holds(there.seed, 2)


def test_the_publish_of_a_killed_trainer_is_abandoned(tmp_path: Path):
    """A real process, killed with SIGKILL while it encodes its last block, so that it cannot have sent all."""
    with running(tmp_path) as there:
        code = (
            "import sys, time, numpy as np; from codec import Replica; from node import Swarm\n"
            "encode = Replica.encode_changes\n"
            "def wait_at_the_last(self, block, *rest):\n"
            "    time.sleep(60 * (block == self.layout.n_blocks - 1))\n"
            "    return encode(self, block, *rest)\n"
            "Replica.encode_changes = wait_at_the_last\n"
            "swarm = Swarm.attach(home=sys.argv[1], threads=1)\n"
            "pairs = [(t.name, np.ones(t.shape, t.type.bits)) for t in swarm.layout.tensors]\n"
            "swarm.publish(pairs, step=1).wait(timeout_s=60)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "NUMBA_NUM_THREADS": "1"}
        )
        while not there.seed.attempts:
            time.sleep(0.02)
            assert process.poll() is None
        process.kill()
        process.wait()
        while not there.seed.abandoned:
            time.sleep(0.02)
        with Swarm.attach(home=tmp_path) as swarm:
            swarm.publish(weights(1), step=1).wait(timeout_s=30)
        assert [attempt.attempt for attempt in there.seed.attempts] == [0, 1]
        assert_holds(there.seed, 1)


def test_rollback_and_resume(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        roots = [swarm.publish(weights(v), step=v).wait(timeout_s=30).root for v in (1, 2, 3)]
        assert swarm.resume(roots[2] or b"") == (0, 3), "the head needs no rollback"
        assert swarm.rollback(1) == (1, 1)
        assert_holds(there.seed, 1)
        publication = swarm.publish(weights(2), step=4).wait(timeout_s=30)
        assert (publication.epoch, publication.version, publication.root) == (1, 2, roots[1])
        assert swarm.rollback(1, weights(1)) == (2, 1)
        assert_holds(there.seed, 1)
        with pytest.raises(UsageError, match="are not those of version"):
            swarm.rollback(0, weights(2))
        assert swarm.head == (2, 1)
        with pytest.raises(UsageError, match="no such version"):
            swarm.resume(bytes(32))
        swarm.publish(weights(3), step=5).wait(timeout_s=30)
        assert_holds(there.seed, 3)


def test_a_rollback_waits_for_publications_in_progress(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        there.pause()
        first, second = swarm.publish(weights(1), step=1), swarm.publish(weights(2), step=2)
        assert swarm.state["unsealed"] == [1, 2]
        with pytest.raises(SwarmTimeout, match="older version"):
            swarm.rollback(0, timeout_s=0.05)
        there.resume()
        assert swarm.rollback(0) == (1, 0)
        assert first.sealed
        assert second.sealed
        assert there.seed.receiver.root == random_replica().root


def test_a_version_that_another_trainer_published_becomes_the_parent(tmp_path: Path):
    """The second trainer's view of the replica is old. It attaches again, and diffs against the new parent."""
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as one, Swarm.attach(home=tmp_path) as two:
        one.publish(weights(1), step=1).wait(timeout_s=30)
        two.publish(weights(2), step=2).wait(timeout_s=30)
        assert_holds(there.seed, 2)
        assert two.head == (0, 2)


@pytest.mark.parametrize("source", ["mapping", "iterator"])
def test_a_copy_that_fails_leaves_the_next_publish_unharmed(tmp_path: Path, source: str):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        wrong = weights(1) | {"d.scale": torch.zeros((), dtype=torch.float64)}
        for _ in range(3):  # more often than there are copies of the weights
            with pytest.raises(UsageError, match="float64"):
                swarm.publish(wrong if source == "mapping" else iter(wrong.items()), step=1)
        swarm.publish(weights(1), step=1).wait(timeout_s=30)
        assert_holds(there.seed, 1)
        assert len(there.seed.attempts) == 1
        assert "publish_error" not in swarm.state


# ------------------------------------------------------------ rollouts


def test_groups_are_complete(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        groups = list(swarm.rollouts([[1, 2], [3], [4, 5, 6]] * 20, n=4, sampling=SAMPLING, timeout_s=30))
        assert sorted(group.index for group in groups) == list(range(60))
        for group in groups:
            assert group.prompt == ((1, 2), (3,), (4, 5, 6))[group.index % 3]
            assert [rollout.token_ids for rollout in group.rollouts] == [(9, 10 + i, 2) for i in range(4)]
            for rollout in group.rollouts:
                assert rollout.logprobs == (-0.5, -1.0, -2.0)
                assert rollout.versions == ((0, 0),) * 3
                assert rollout.finish_reason == "stop"
                assert rollout.node == there.node.key.public
        assert all(verdict.refused is None for verdict in there.node.verdicts)
        assert swarm.state["work"]["groups_open"] == 0


def test_samples_that_fail_the_check_are_replaced_and_their_node_is_quarantined(tmp_path: Path):
    doubting = True
    asked: list[int] = []

    def score(prompt: tuple[int, ...], rollout: Rollout) -> tuple[float, ...] | None:
        asked.append(prompt[0])
        if prompt == (2,):
            return None  # the trainer no longer has that version
        return (-3.0, -3.0, -3.0) if prompt == (3,) and doubting else rollout.logprobs

    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        check = Check(score, share=1.0, tolerance=0.05)
        groups = swarm.rollouts([[1], [2], [3]], n=2, sampling=SAMPLING, check=check, timeout_s=60)
        got = []
        trainer = threading.Thread(target=lambda: got.extend(groups))
        trainer.start()
        deadline = time.monotonic() + 30
        while not (record := there.call(there.service.reputation)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert record[0]["node"] == there.node.key.public
        assert "the trainer's own computation: off by 1.83 nats" in record[0]["why"]
        assert 2 not in [group.index for group in got]
        doubting = False
        assert there.call(there.service.release, there.node.key.public, "the test continues")
        trainer.join(60)
        assert sorted(group.index for group in got) == [0, 1, 2]
        assert asked.count(3) == 3, "checked once and refused; then two new samples are checked"


def test_no_token_is_older_than_max_lag_even_in_groups_in_the_socket(tmp_path: Path):
    """Groups of version 0 are in the socket when the trainer publishes version 1."""
    with running(tmp_path) as there, Swarm.attach(weights(0), home=tmp_path, max_lag=0) as swarm:
        groups = swarm.rollouts([[i] for i in range(12)], n=2, sampling=SAMPLING, timeout_s=60)
        assert next(groups).oldest == (0, 0)
        deadline = time.monotonic() + 30
        while there.call(there.service.status).groups_ready < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        there.pause()  # the version is begun but cannot be sealed
        publication = swarm.publish(weights(1), step=1)
        got: list[Any] = []
        trainer = threading.Thread(target=lambda: got.extend(groups))
        trainer.start()
        while there.call(there.service.status).groups_ready:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not got, "groups of version 0 are too old for these weights"
        there.call(there.seed.slow.set)
        publication.wait(timeout_s=30)
        trainer.join(60)
        assert sorted(group.index for group in got) == list(range(1, 12))
        assert {group.oldest for group in got} == {(0, 1)}


def test_an_endless_iterator_is_read_only_as_fast_as_groups_are_taken(tmp_path: Path):
    pulled = 0

    def prompts():
        nonlocal pulled
        while True:
            pulled += 1
            yield [pulled]

    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        groups = swarm.rollouts(prompts(), n=4, sampling=SAMPLING, timeout_s=30)
        for _ in range(10):
            next(groups)
        assert pulled < 10 + 20
        groups.close()
        deadline = time.monotonic() + 10
        # The tenth group was never confirmed: it is ready until the seed drops all, while none may be open before.
        while (status := there.call(there.service.status)).groups_open or status.groups_ready:
            assert time.monotonic() < deadline, "closing withdraws all groups"
            time.sleep(0.01)


@pytest.mark.parametrize("sized", [True, False])
def test_the_ledger_knows_how_many_samples_come_if_the_prompts_have_a_length(tmp_path: Path, sized: bool):
    prompts = [[1]] * 5000 if sized else ([1] for _ in range(5000))
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        groups = swarm.rollouts(prompts, n=4, sampling=SAMPLING, timeout_s=30)
        for _ in range(8):
            next(groups)
        to_come = there.call(there.service.status).samples_to_come
        assert (0 < to_come < 4 * 5000) if sized else (to_come == 0), to_come
        groups.close()
        deadline = time.monotonic() + 30
        while there.call(there.service.status).samples_to_come:
            assert time.monotonic() < deadline, "closing the iterator must withdraw the announced samples"
            time.sleep(0.01)


def test_a_group_that_takes_too_long_is_a_typed_error(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        there.node.paused = True
        with pytest.raises(SwarmTimeout, match="1 are open"):
            next(swarm.rollouts([[1]], n=1, sampling=SAMPLING, timeout_s=0.3))


@pytest.mark.parametrize(
    ("options", "says", "can"),
    [
        ({"top_k": 5, "min_p": 0.1}, "top_k, min_p", None),
        ({"top_k": 5}, "top_k", ()),
        ({"top_k": 5, "seeded": True, "exact": True}, "exact", (OPTIONS,)),
        ({"top_k": 5}, None, (OPTIONS,)),
        ({}, None, None),  # default options
    ],
)
def test_options_that_no_node_supports_are_named(
    tmp_path: Path, monkeypatch, caplog, options: dict[str, Any], says: str | None, can: tuple[str, ...] | None
):
    """`can`: the abilities that the only node reports; None: a node of an older release, which reports none."""
    monkeypatch.setattr(patience, "SAY_AFTER_S", 0.3)
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        there.seed.status = lambda: SeedStatus(nodes=[MemberStatus(engine=(0, 0), held=(0, 0))])
        if can is not None:
            there.call(there.service.hear, there.node.key.public, encode(Abilities(can, "a kind")))
        sampling = msgspec.structs.replace(SAMPLING, options=SamplingOptions(**options))
        groups = swarm.rollouts([[1]], n=1, sampling=sampling, timeout_s=2.0 if says else 30.0)
        if says is None:
            assert next(groups).index == 0
            return
        with pytest.raises(SwarmTimeout, match=f"No node's engine can do these sampling options: {says}\\. Leave"):
            next(groups)
        assert f"rollouts: no group yet. No node's engine can do these sampling options: {says}." in caplog.text


def test_a_key_makes_work_outlive_the_trainer_and_the_seed(tmp_path: Path):
    seed = FakeSeed(random_replica())
    with running(tmp_path, seed), Swarm.attach(home=tmp_path) as swarm:
        groups = swarm.rollouts([[1], [2], [3]], n=2, sampling=SAMPLING, key="step-7", timeout_s=30)
        first = next(groups)
        groups.close()
    with running(tmp_path, seed) as there, Swarm.attach(home=tmp_path) as swarm:
        there.node.paused = True  # so all groups that arrive now were complete before
        again = list(swarm.rollouts([[1], [2], [3]], n=2, sampling=SAMPLING, key="step-7", timeout_s=30))
        assert sorted(group.index for group in again) == [0, 1, 2]
        assert first in again


OTHER: list[tuple[str, Any, str]] = [
    ("prompts", [[1], [2], [4]], r"prompts=3 prompts with hash \w{8}; now .*prompts=3 prompts with hash \w{8}"),
    ("prompts", [[1], [2]], r"prompts=3 prompts with hash \w{8}; now .*prompts=2 prompts"),
    ("iterator", [[1], [2], [4]], r"the prompt=1 tokens with hash \w{8}; now"),
    ("n", 3, "n=2; now it is asked with n=3"),
    ("sampling", SamplingParams(max_tokens=5, stop_tokens=(2,)), "max_tokens=4; now it is asked with max_tokens=5"),
    ("sampling", SamplingParams(max_tokens=4, temperature=0.7), "temperature=1.0, stop_tokens=.2,.; now"),
    ("whole", True, "whole=False; now it is asked with whole=True"),
]


@pytest.mark.parametrize(("what", "other", "says"), OTHER)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_key_is_bound_to_its_prompts_and_sampling(tmp_path: Path, what: str, other: Any, says: str, restarted: bool):
    """Other work under a key is refused, also after a restart of the seed. Old samples never answer new prompts."""
    seed = FakeSeed(random_replica())
    asked: dict[str, Any] = {"prompts": [[1], [2], [3]], "n": 2, "sampling": SAMPLING}
    changed = {"prompts": iter(other)} if what == "iterator" else {what: other}

    def again(swarm: Swarm) -> None:
        with pytest.raises(UsageError, match=f"key 'train' is bound to .*{says}.*another key"):
            list(swarm.rollouts(**(asked | changed), key="train", timeout_s=30))
        first = list(swarm.rollouts(**asked, key="train", timeout_s=30))
        assert sorted(group.prompt for group in first) == [(1,), (2,), (3,)], (
            "the work that the key is bound to is still delivered"
        )

    with running(tmp_path, seed), Swarm.attach(home=tmp_path) as swarm:
        list(swarm.rollouts(**asked, key="train", timeout_s=30))
        if not restarted:
            again(swarm)
    if restarted:
        with running(tmp_path, seed), Swarm.attach(home=tmp_path) as swarm:
            again(swarm)


def test_a_key_is_bound_to_max_lag(tmp_path: Path):
    with running(tmp_path):
        with Swarm.attach(home=tmp_path) as swarm:
            list(swarm.rollouts([[1]], n=1, sampling=SAMPLING, key="k", timeout_s=30))
        with (
            Swarm.attach(home=tmp_path, max_lag=0) as swarm,
            pytest.raises(UsageError, match="max_lag=0"),
        ):
            list(swarm.rollouts([[1]], n=1, sampling=SAMPLING, key="k", timeout_s=30))


@pytest.mark.parametrize("key", ["", "k" * 129, "volatile/k"])
def test_an_unusable_key_is_refused(tmp_path: Path, key: str):
    with running(tmp_path), Swarm.attach(home=tmp_path) as swarm, pytest.raises(UsageError, match="key"):
        list(swarm.rollouts([[1]], n=1, sampling=SAMPLING, key=key, timeout_s=5))


BAD: list[tuple[Any, str]] = [
    ([], "empty"),
    ([1.5, 2.0], "holds a float: give token ids, a text, or chat messages"),
    ([[1, 2]], "holds a list"),
    (7, "of type int"),
    (None, "NoneType"),
    (b"abc", "of type bytes"),
    ({"messages": []}, "of type dict"),
    ([-1], "token id -1"),
    ([1 << 32], "token id 4294967296"),
    ([1] * 70_000, "70,000 tokens; at most 65,536"),
    ([1] * 50, "The model reads 32 tokens; the prompt has 50, and max_tokens asks for 4 more: give a shorter prompt"),
    ([1] * 30, "asks for 4 more: ask for at most 2"),
    ([5, 99], "Token 1 of the prompt is 99; the model's token ids are 0 to 63"),
]


@pytest.mark.parametrize("sized", [True, False])
def test_a_bad_prompt_is_refused_with_a_reason_and_the_others_go_on(tmp_path: Path, sized: bool):
    seed = FakeSeed(random_replica())
    seed.files = {"config.json": b'{"max_position_embeddings": 32, "vocab_size": 64}'}
    prompts = [prompt for bad, _ in BAD for prompt in ([1, 2], bad)] + [[3]]
    with running(tmp_path, seed) as there, Swarm.attach(home=tmp_path) as swarm:
        asked = prompts if sized else iter(prompts)
        found = sorted(swarm.rollouts(asked, n=2, sampling=SAMPLING, timeout_s=30), key=lambda group: group.index)
        assert [group.index for group in found] == list(range(len(prompts))), "each prompt has one result"
        for group, prompt in zip(found, prompts, strict=True):
            why = next((why for bad, why in BAD if bad is prompt), None)
            if why is None:
                assert group.refused is None
                assert len(group.rollouts) == 2
                continue
            assert why in (group.refused or "")
            assert group.prompt is prompt, "the prompt as it was given"
            with pytest.raises(PromptRefused, match=f"Prompt {group.index} was refused") as refused:
                _ = group.rollouts
            assert refused.value.index == group.index
        work = there.call(there.service.status)
        assert work.accepted == 2 * (len(BAD) + 1), "nothing was generated for refused prompts"
        assert work.samples_to_come == 0


def test_a_prompt_that_no_engine_accepts_is_refused_too(tmp_path: Path):
    with running(tmp_path) as there, Swarm.attach(home=tmp_path) as swarm:
        there.node.cannot = {(2,)}
        found = list(swarm.rollouts([[1], [2], [3]], n=2, sampling=SAMPLING, timeout_s=30))
        assert {group.index: group.refused for group in found} == {
            0: None,
            1: "No node can do this work: it is too hard",
            2: None,
        }


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ("hello", "prompts is one str"),
        ([{"role": "user", "content": "hi"}], "one conversation: give a list of conversations"),
        ([1, 2, 3], "one list of token ids"),
    ],
)
def test_a_single_prompt_instead_of_a_list_is_refused_at_once(tmp_path: Path, prompts: Any, says: str):
    with running(tmp_path), Swarm.attach(home=tmp_path) as swarm, pytest.raises(UsageError, match=says):
        swarm.rollouts(prompts, n=1, sampling=SAMPLING)


class Delivered:
    """A channel that has received all of its messages already."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = deque(messages)
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def recv(self, timeout_s: float) -> tuple[Any, list[int]]:
        if not self.messages:
            raise ChannelTimeout("nothing more")
        return self.messages.popleft(), []


def test_of_several_complete_groups_the_earliest_prompt_comes_first():
    """The first prompt finishes last, but before the trainer asks for a group, so it comes first."""
    names = [group_id("s", index) for index in range(4)]
    asked = OpenRollouts("s", 1, SAMPLING)
    read = iter([_Prompt(index, [index], pack_tokens([index])) for index in range(4)])
    batch = _Batch(asked, read, 5.0, None, lambda: (0, 0), lambda: "")
    done = [
        Sample(names[index], 0, 0, pack_tokens([9]), pack_floats([-1.0]), "length", ((0, 0, 1),), bytes(32))
        for index in (2, 1, 3, 0)
    ]
    channel = Delivered([Room(5), *done])
    groups = batch.converse(channel)  # type: ignore[arg-type]
    assert [group.index for group in groups] == [0, 1, 2, 3]
    assert [message.group for message in channel.sent if isinstance(message, Taken)] == names


def test_an_iterator_of_groups_survives_a_restart_of_the_seed(tmp_path: Path):
    seed = FakeSeed(random_replica())
    got = []
    with running(tmp_path, seed) as there:
        swarm = Swarm.attach(home=tmp_path)
        groups = swarm.rollouts([[i] for i in range(12)], n=2, sampling=SAMPLING, timeout_s=30)
        got += [next(groups) for _ in range(3)]
        there.node.paused = True
    more = threading.Thread(target=lambda: got.extend(groups))
    more.start()
    with running(tmp_path, seed):
        more.join(30)
        assert not more.is_alive()
        assert sorted(group.index for group in got) == list(range(12))
        swarm.close()


def test_text_needs_a_base_folder(tmp_path: Path):
    with running(tmp_path), Swarm.attach(home=tmp_path) as swarm, pytest.raises(UsageError, match="tokenizer"):
        next(swarm.rollouts(["hello"], n=1, sampling=SAMPLING, timeout_s=5))


def test_the_trainers_side_needs_neither_torch_nor_trio_nor_libp2p():
    code = "import sys; from node import Swarm; print([m for m in ('torch', 'trio', 'libp2p') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_chunks_leave_while_later_tensors_are_still_being_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last block is not compared before the seed has a chunk of the first ones."""
    layout = Layout(tuple(TensorSpec(f"t{i:02}", "BF16", (1 << 18,)) for i in range(24)))
    seed = FakeSeed(random_replica(layout))
    after = {spec.name: seed.replica.bits(spec.name).copy() for spec in layout.tensors}
    for bits in after.values():
        bits[::20] ^= np.uint16(1)
    encode_block, encoded = Replica.encode_changes, []

    def held_up(self: Replica, block: int, new: Any, coder: int = CODER_RICE) -> Any:
        deadline = time.monotonic() + 20.0
        while block == layout.n_blocks - 1 and not seed.chunks and time.monotonic() < deadline:
            time.sleep(0.01)
        encoded.append((block, len(seed.chunks)))
        return encode_block(self, block, new, coder)

    monkeypatch.setattr(Replica, "encode_changes", held_up)
    with running(tmp_path, seed), Swarm.attach(home=tmp_path, threads=1) as swarm:
        publication = swarm.publish(after.items(), step=1).wait(timeout_s=60)
    assert dict(encoded)[layout.n_blocks - 1] > 0
    assert publication.root == seed.receiver.root == seed.replica.root
    assert all(np.array_equal(seed.receiver.bits(name), bits) for name, bits in after.items())
