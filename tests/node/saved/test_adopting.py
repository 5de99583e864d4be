"""A seed that has lost its disk, or has taken over, adopts the newest saved state of the nodes."""

import os
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_kit import KEY, OTHER, Bench, as_kind, bench, coded, until
from structlog.testing import capture_logs

from codec.errors import PeerError, UsageError
from node.saved import adopting, coding, fetching
from node.saved import placement as pauses
from node.saved import placer as placing
from node.saved.adopting import Adopter, OnDisk
from node.saved.coding import RECORD, CodedState, complete_fragments, fragment_name, join_file
from node.saved.conversation import Conversation
from node.saved.holder import Holder
from node.saved.messages import Body, Fetch, HeldState
from node.saved.placement import Placement
from node.saved.placer import Placer
from node.saved.record import open_record
from node.saved.rescue import Wanted, fetch_from_nodes
from swarm.protocol.membership.roster import Member
from swarm.runtime.threads import in_thread
from swarm.store.disk import Disk
from swarm.transport.base import Unreachable

CONTENT = os.urandom(3_000_000)
NEWER = os.urandom(2_000_000)
SEGMENT_BYTES = 1_500_096
"""Of the only segment of a fragment of `CONTENT`, among four nodes."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a minute here."""
    monkeypatch.setattr(adopting, "LOOK_S", 0.05)
    monkeypatch.setattr(adopting, "AGAIN_S", 0.1)
    monkeypatch.setattr(adopting, "MOST_AGAIN_S", 0.4)
    monkeypatch.setattr(placing, "LOOK_S", 0.1)
    monkeypatch.setattr(placing, "KEEP_LOOK_S", 0.3)
    monkeypatch.setattr(pauses, "AGAIN_S", 0.1)


def lose_disk(made: Bench) -> None:
    shutil.rmtree(made.folder / "seed")


def serials(placer: Placer) -> list[int]:
    return [record.serial for record, _ in placer.states()]


def is_kept(placer: Placer, state: CodedState, nodes: int = 4) -> Callable[[], bool]:
    """Whether the state, and no other, is whole here, with its fragments at so many nodes."""

    def kept() -> bool:
        found = [(record, len(set(at))) for record, at in placer.states()]
        return found == [(state.record, nodes)] and placer.whole == state.record.serial

    return kept


def read(path: Path) -> bytes:
    return path.read_bytes()


async def rescued(made: Bench, out: Path, node: int) -> bytes:
    await fetch_from_nodes(KEY, (made.nodes[node].addrs[0],), Wanted(None, out))
    return read(out)


# ------------------------------------------------------------ all fragments from enough of them


@settings(max_examples=25)
@given(data=st.data(), total=st.integers(1, 12), size=st.integers(1, 400_000))
def test_any_enough_fragments_make_the_others_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, total: int, size: int
) -> None:
    folder = tmp_path_factory.mktemp("coded")
    state = coded(folder, os.urandom(size), total=total)
    needed = state.record.needed
    chosen = data.draw(st.sets(st.integers(0, total - 1), min_size=needed, max_size=total))
    some = folder / "some"
    some.mkdir()
    for number in chosen:
        shutil.copy(state.path(number), some)
    complete_fragments(some, state.record, state.sealed)
    assert sorted(path.name for path in some.iterdir()) == sorted(path.name for path in state.folder.iterdir())
    assert all((some / path.name).read_bytes() == path.read_bytes() for path in state.folder.iterdir())
    opened = CodedState.open(some, KEY.public)
    assert (opened.record, opened.sealed) == (state.record, state.sealed)


def test_fragments_of_several_segments_are_completed(tmp_path: Path) -> None:
    content = os.urandom(20_000_000)  # two segments, the second a short one
    state = coded(tmp_path, content)
    assert state.record.segments == 2
    for chosen in combinations(range(4), 2):
        some = tmp_path / f"some{chosen}"
        some.mkdir()
        for number in chosen:
            shutil.copy(state.path(number), some)
        complete_fragments(some, state.record, state.sealed)
        lost = {number: some / fragment_name(number) for number in range(4) if number not in chosen}
        join_file(lost, state.record, KEY, tmp_path / f"out{chosen}")
        assert (tmp_path / f"out{chosen}").read_bytes() == content


@pytest.mark.parametrize("damage", ["flip", "cut off"])
def test_a_fragment_that_has_changed_on_disk_is_removed_and_nothing_counts(tmp_path: Path, damage: str) -> None:
    state = coded(tmp_path, CONTENT)
    (state.folder / RECORD).unlink()
    for number in (0, 2):
        state.path(number).unlink()
    before = state.path(3).read_bytes()
    state.path(3).write_bytes(before[:-1] + (bytes([before[-1] ^ 1]) if damage == "flip" else b""))
    with pytest.raises(PeerError, match="fragment 3 has changed"):
        complete_fragments(state.folder, state.record, state.sealed)
    assert not state.path(3).exists()
    assert not (state.folder / RECORD).exists()
    with pytest.raises(PeerError, match="1 fragments are here, and 2 are needed"):
        complete_fragments(state.folder, state.record, state.sealed)


def test_completing_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    state = coded(tmp_path, CONTENT)
    (state.folder / RECORD).unlink()
    state.path(1).unlink()
    state.path(2).rename(state.folder / (fragment_name(2) + ".tmp"))

    def crash(done: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        complete_fragments(state.folder, state.record, state.sealed, crash)
    with pytest.raises(OSError, match=RECORD):
        CodedState.open(state.folder, KEY.public)
    complete_fragments(state.folder, state.record, state.sealed)
    assert CodedState.open(state.folder, KEY.public) == state


class Crash(Exception):
    """The process ends here."""


def is_there(folder: Path, state: CodedState) -> bool:
    """Whether a start finds the state, which is then bit for bit what was coded."""
    try:
        found = CodedState.open(folder, KEY.public)
    except OSError:
        return False
    assert all(found.path(number).read_bytes() == state.path(number).read_bytes() for number in range(4))
    return found.sealed == state.sealed


async def test_a_crash_at_any_step_leaves_a_whole_state_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = coded(tmp_path, CONTENT)
    left, ended, crashes = 0, False, 0

    def before(step: str, path: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash

    monkeypatch.setattr(adopting, "Disk", lambda: Disk(before))
    monkeypatch.setattr(coding, "Disk", lambda: Disk(before))
    while not ended:
        states = tmp_path / f"states{crashes}"
        coming = fetching.fetched_folder(states / ".adopting", state.record)
        coming.mkdir(parents=True)
        for number in (1, 3):
            shutil.copy(state.path(number), coming)
        left = crashes
        try:
            await in_thread(adopting._complete, states, coming.parent, state.record, state.sealed)
            ended = True
        except Crash:
            crashes += 1
        if not is_there(states / coming.name, state):
            left = 1000
            await in_thread(adopting._complete, states, coming.parent, state.record, state.sealed)
        assert is_there(states / coming.name, state)
    assert crashes > 8


# ------------------------------------------------------------ who is believed


A, B = b"A" * 32, b"B" * 32


def test_a_node_is_believed_what_it_proves() -> None:
    placement = Placement(3)
    placement.note_members([A, B])
    placement.note_held(A, [0, 2, 9])
    assert placement.holders == {}, "nothing was placed with it"
    assert placement.to_prove(A, [2, 0, 9]) == [0, 2]
    placement.proved(A, 0)
    assert placement.holders == {0: A}
    assert placement.to_prove(B, [0, 1, 2]) == [1, 2], "what is held needs no other holder"
    placement.doubted(B)
    assert placement.to_prove(B, [1]) == []
    assert placement.to_prove(A, [1]) == [1]
    placement.note_members([A])
    placement.note_members([A, B])
    assert placement.to_prove(B, [1]) == [1], "a node that joins again is asked again"
    assert placement.to_prove(b"C" * 32, [1]) == [], "no member"
    after = Placement(3, placement.given)
    after.note_members([A, B])
    after.note_held(A, [0, 1])
    assert after.holders == {0: A}


# ------------------------------------------------------------ among nodes


async def test_a_seed_with_a_new_disk_looks_after_the_state_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 17, made.tell)
            kept = {path.name: path.read_bytes() for path in first.folder.iterdir() if path.name != "placed"}
        before = [node.fragments for node in made.nodes]
        lose_disk(made)
        with capture_logs() as logs:
            async with made.seed() as seed:
                await until(is_kept(seed, first))
                assert seed.whole == first.record.serial
                assert [node.fragments for node in made.nodes] == before, "no fragment has moved"
                assert {name: (first.folder / name).read_bytes() for name in kept} == kept
                spare = await made.add_node()
                lost = made.nodes[1]
                made.kill(lost)
                lost.has_left = True
                await until(lambda: spare.fragments == lost.fragments)
                await until(lambda: len(seed.addresses) == 4)
        (adopted,) = [line for line in logs if line["event"] == "state_adopted"]
        assert (adopted["step"], adopted["bytes"], adopted["fragments"]) == (17, len(CONTENT), 4)
        assert await rescued(made, tmp_path / "out", 4) == CONTENT
        assert not (tmp_path / "seed" / ".adopting").exists()


async def test_after_a_restart_an_adopted_state_is_as_any_other(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        lose_disk(made)
        async with made.seed() as seed:
            await until(is_kept(seed, first))
        with capture_logs() as logs:
            async with made.seed() as seed:
                await until(is_kept(seed, first))
        assert not [line for line in logs if line["event"] == "state_adopted"]


async def test_a_seed_that_led_before_adopts_what_another_one_saved_since(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 1, made.tell)
        shutil.copytree(tmp_path / "seed", tmp_path / "former")
        async with made.seed() as seed:
            newer = await seed.save(made.file(NEWER), 2, made.tell)
        lose_disk(made)
        shutil.copytree(tmp_path / "former", tmp_path / "seed")
        async with made.seed() as seed:
            await until(is_kept(seed, newer))
            await until(lambda: len(list((tmp_path / "seed").glob("*/"))) == 1)
            await until(lambda: made.counts() == [1, 1, 1, 1])


async def test_it_waits_until_enough_nodes_are_there(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        lose_disk(made)
        for node in made.nodes:
            node.has_left = True
        with capture_logs() as logs:
            async with made.seed() as seed:
                await trio.sleep(0.3)
                assert not logs, "there is nobody to ask"
                made.nodes[2].has_left = False
                await until(lambda: any(line["event"] == "state_not_adopted" for line in logs))
                (said,) = [line["why"] for line in logs if line["event"] == "state_not_adopted"]
                assert said.endswith("(1) do not have the 2 that the state of step 1 needs.")
                made.nodes[0].has_left = False
                await until(is_kept(seed, first, nodes=2))
        assert len([line for line in logs if line["event"] == "state_not_adopted"]) == 1, "said once"


async def test_what_an_interrupted_attempt_fetched_is_not_fetched_again(tmp_path: Path) -> None:
    content = os.urandom(20_000_000)
    async with bench(tmp_path, nodes=2) as made:
        for _ in range(2):
            await made.add_node(wrap=as_kind(Counting))
        async with made.seed() as seed:
            first = await seed.save(made.file(content), 1, made.tell)
        lose_disk(made)
        for node in made.nodes[:2]:
            node.has_left = True
        Counting.given, Counting.go = [], trio.Event()
        async with made.seed():
            await until(lambda: len(Counting.given) == 2)
            coming = tmp_path / "seed" / ".adopting" / f"{first.record.serial:016x}"
            await until(lambda: sum(path.stat().st_size for path in coming.glob("*")) > first.record.segment_bytes)
        assert not (tmp_path / "seed" / f"{first.record.serial:016x}").exists()
        Counting.go.set()
        begun = list(Counting.given)
        async with made.seed() as seed:
            await until(lambda: serials(seed) == [first.record.serial])
            again = Counting.given[len(begun) :]
        assert len([segment for segment in again if segment == (first.record.serial, 0)]) <= 4
        assert all(
            (first.folder / fragment_name(number)).stat().st_size == first.record.fragment_bytes for number in range(4)
        )


class Counting(Holder):
    """Gives the first segment of each fragment at once, and the others once `go` is set."""

    given: list[tuple[int, int]]
    go: trio.Event

    async def _give_segment(self, conversation: Conversation, asked: Fetch) -> None:
        if asked.segment:
            await self.go.wait()
        self.given.append((asked.serial, asked.segment))
        await super()._give_segment(conversation, asked)


@pytest.mark.parametrize("damaged", [False, True])
async def test_the_fragment_that_it_held_as_a_node_counts(tmp_path: Path, *, damaged: bool) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        lose_disk(made)
        for node in made.nodes[1:]:
            node.has_left = True
        taking_over = made.nodes[0]
        made.kill(taking_over)
        taking_over.has_left = True
        if damaged:
            (path,) = taking_over.folder.glob("*/*.fragment")
            path.write_bytes(bytes(first.record.fragment_bytes))
        with capture_logs() as logs:
            async with made.seed(own=taking_over.folder) as seed:
                made.nodes[1].has_left = False
                if damaged:
                    await until(lambda: any(line["event"] == "state_not_adopted" for line in logs))
                    assert not seed.states()
                    made.nodes[2].has_left = False
                await until(is_kept(seed, first, nodes=1 + damaged))
                assert len(taking_over.fragments) == 1


async def test_fragments_of_nodes_that_have_left_since_count(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=3) as made:
        await made.add_node(wrap=as_kind(Stalling))
        Stalling.asked, Stalling.go = trio.Event(), trio.Event()
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        lose_disk(made)
        for node in made.nodes[1:3]:
            node.has_left = True
        coming = tmp_path / "seed" / ".adopting" / first.folder.name
        async with made.seed():
            await until(lambda: bool(list(coming.glob("*.fragment"))))
            await Stalling.asked.wait()
        made.nodes[0].has_left = True
        made.kill(made.nodes[0])
        async with made.seed() as seed:
            made.nodes[3].has_left = False
            Stalling.go.set()
            await until(is_kept(seed, first, nodes=1))


# ------------------------------------------------------------ a trainer that saves meanwhile


class Stalling(Holder):
    """Gives no segment before `go` is set, and says that it was asked for one."""

    asked: trio.Event
    go: trio.Event

    async def _give_segment(self, conversation: Conversation, asked: Fetch) -> None:
        self.asked.set()
        await self.go.wait()
        await super()._give_segment(conversation, asked)


async def test_a_state_that_a_trainer_saves_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path, nodes=0) as made:
        for _ in range(4):
            await made.add_node(wrap=as_kind(Stalling))
        Stalling.asked, Stalling.go = trio.Event(), trio.Event()
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        lose_disk(made)
        monkeypatch.setattr("time.time_ns", lambda: 5_000_000)  # the clock of the new machine is wrong
        with capture_logs() as logs:
            async with made.seed() as seed:
                await Stalling.asked.wait()
                newer = await seed.save(made.file(NEWER), 2, made.tell)
                assert newer.record.serial == first.record.serial + 1, "nodes refuse what is older than theirs"
                Stalling.go.set()
                await trio.sleep(0.5)
                assert serials(seed) == [newer.record.serial]
                assert not (tmp_path / "seed" / ".adopting").exists()
        assert not [line for line in logs if line["event"] in ("state_adopted", "state_not_adopted")]
        assert made.counts() == [1, 1, 1, 1]
        assert await rescued(made, tmp_path / "out", 0) == NEWER


async def test_when_that_state_cannot_be_coded_the_one_before_is_adopted(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=0) as made:
        for _ in range(4):
            await made.add_node(wrap=as_kind(Stalling))
        Stalling.asked, Stalling.go = trio.Event(), trio.Event()
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        lose_disk(made)
        async with made.seed() as seed:
            await Stalling.asked.wait()
            with pytest.raises(UsageError, match="Cannot read"):
                await seed.save(tmp_path / "none", 2, made.tell)
            Stalling.go.set()
            await until(is_kept(seed, first))


async def test_a_state_that_a_trainer_saves_after_it_is_newer(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        lose_disk(made)
        async with made.seed() as seed:
            await until(is_kept(seed, first))
            newer = await seed.save(made.file(NEWER), 2, made.tell)
            assert newer.record.serial > first.record.serial
            await until(is_kept(seed, newer))
            await until(lambda: made.counts() == [1, 1, 1, 1])


# ------------------------------------------------------------ disks


async def test_a_disk_without_room_is_not_filled_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        lose_disk(made)
        with monkeypatch.context() as patched, capture_logs() as logs:
            patched.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=10**9, free=10**6))
            async with made.seed() as seed:
                await until(lambda: any(line["event"] == "state_not_adopted" for line in logs))
                (said,) = [line["why"] for line in logs if line["event"] == "state_not_adopted"]
                assert "GB left. Free some space" in said
                assert not list((tmp_path / "seed" / ".adopting").glob("*/*"))
                patched.undo()
                await until(is_kept(seed, first))


async def test_a_state_of_which_a_fragment_is_damaged_here_is_fetched_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        os.truncate(first.path(2), 100)
        async with made.seed() as seed:
            await until(is_kept(seed, first))
            assert seed.whole == first.record.serial
        assert CodedState.open(first.folder, KEY.public) == first


# ------------------------------------------------------------ nodes that lie


def claiming(
    state: CodedState, kind: type[Holder] = Holder, fragments: tuple[int, ...] = (0, 1, 2, 3)
) -> Callable[[Holder], Holder]:
    """A node that says it has these fragments of a state, too."""

    def wrap(made: Holder) -> Holder:
        held = made._folder.held
        made._folder.held = lambda: (HeldState(state.sealed, fragments), *held())
        return as_kind(kind)(made)

    return wrap


class Wrong(Holder):
    """Sends other bytes than it has, of any state."""

    async def _give_segment(self, conversation: Conversation, asked: Fetch) -> None:
        records = [open_record(state.record, self._swarm) for state in self._folder.held()]
        (size,) = [each.bytes_of_segment(asked.segment) for each in records if each.serial == asked.serial]
        await conversation.send(Body(size))
        await conversation.send_part(bytes(size))


@pytest.mark.parametrize("kind", [Holder, Wrong], ids=["has nothing of it", "sends wrong bits"])
async def test_a_newer_state_that_a_node_only_claims_is_given_up_for_the_one_before(
    tmp_path: Path, kind: type[Holder]
) -> None:
    newer = coded(tmp_path, NEWER, serial=1 << 62)
    async with bench(tmp_path, nodes=4) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        await made.add_node(wrap=claiming(newer, kind))
        lose_disk(made)
        async with made.seed() as seed:
            await until(is_kept(seed, first))
            assert [path.name for path in (tmp_path / "seed").glob("[!.]*/")] == [first.folder.name]
            after = await seed.save(made.file(NEWER), 2, made.tell)
            assert after.record.serial == newer.record.serial + 1, "its record is the swarm's own"


async def test_a_newer_state_that_was_cut_off_leaves_the_one_on_this_disk(tmp_path: Path) -> None:
    newer = coded(tmp_path, NEWER, serial=1 << 62)
    async with bench(tmp_path, nodes=4) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        await made.add_node(wrap=claiming(newer, fragments=(0,)))
        with capture_logs() as logs:
            async with made.seed() as seed:
                await until(lambda: any(line["event"] == "state_not_adopted" for line in logs))
                await trio.sleep(1.0)  # several attempts
                assert is_kept(seed, first)()
        (said,) = [line["why"] for line in logs if line["event"] == "state_not_adopted"]
        assert said.endswith("do not have the 2 that the state of step 7 needs.")
        assert not [line for line in logs if line["event"] == "state_adopted"]


async def test_a_record_that_the_swarm_has_not_signed_says_nothing(tmp_path: Path) -> None:
    foreign = coded(tmp_path, NEWER, serial=1 << 62, key=OTHER)
    async with bench(tmp_path, nodes=4) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        await made.add_node(wrap=claiming(foreign))
        lose_disk(made)
        with capture_logs() as logs:
            async with made.seed() as seed:
                await until(is_kept(seed, first))
                after = await seed.save(made.file(NEWER), 2, made.tell)
                assert after.record.serial < foreign.record.serial
        assert not [line for line in logs if line["event"] == "state_not_adopted"]


async def test_a_node_that_says_it_holds_what_it_does_not_keeps_nothing_from_the_others(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=4) as made:
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        boasters = [await made.add_node(wrap=claiming(first, kind)) for kind in (Holder, Wrong)]
        lost = made.nodes[3]
        made.kill(lost)
        lost.has_left = True
        lose_disk(made)
        async with made.seed() as seed:
            await until(lambda: sum(len(node.fragments) for node in made.nodes if not node.has_left) == 4)
            await until(is_kept(seed, first))
        placed = [node.fragments for node in boasters if node.fragments]
        assert placed == [lost.fragments], "the lost node's fragment, and no other, was sent to one of them"


async def test_when_too_many_lie_it_says_so_and_nothing_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path, nodes=1) as made:
        for _ in range(3):
            await made.add_node(wrap=as_kind(Wrong))
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 1, made.tell)
        lose_disk(made)
        with capture_logs() as logs:
            async with made.seed() as seed:
                await until(lambda: any(line["event"] == "state_not_adopted" for line in logs))
                assert seed.states() == []
        (said, *_) = [line["why"] for line in logs if line["event"] == "state_not_adopted"]
        assert "give 1 of the 2 fragments that are needed" in said
        assert "another digest" in said


class Dripping(Holder):
    """Sends a byte of a segment now and then."""

    async def _give_segment(self, conversation: Conversation, asked: Fetch) -> None:
        await conversation.send(Body(SEGMENT_BYTES))
        while True:
            await conversation.send_part(b"x")
            await trio.sleep(0.05)


@pytest.mark.slow
async def test_a_node_that_drips_delays_it_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fetching, placing):
        monkeypatch.setattr(module, "SEGMENT_S", 0.5)
        monkeypatch.setattr(module, "MIN_BYTES_S", 1e9)
    monkeypatch.setattr(placing, "ASK_S", 2.0)
    async with bench(tmp_path, nodes=2) as made:
        for _ in range(2):
            await made.add_node(wrap=as_kind(Dripping))
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
            assert first.record.bytes_of_segment(0) == SEGMENT_BYTES
        lose_disk(made)
        async with made.seed() as seed:
            await until(is_kept(seed, first))
        assert made.counts() == [1, 1, 1, 1], "it is asked to take what it has, and says so"


class _NobodyAnswers:
    """A transport to members of which none can be reached."""

    key = KEY.public

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def connect(self, peer: bytes, addrs: tuple[str, ...]) -> None:
        self.asked.append(trio.current_time())
        raise Unreachable("no answer")


async def test_a_seed_that_hears_of_no_state_stops_asking_after_an_hour(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopting, "AGAIN_S", 5.0)
    monkeypatch.setattr(adopting, "MOST_AGAIN_S", 600.0)
    transport = _NobodyAnswers()
    member = Member(0, OTHER.public, ("/ip4/127.0.0.1/tcp/1",), True, "", "", 1.0, False)

    async def take(adopted: object) -> None:
        raise AssertionError("there is nothing to take")

    adopter = Adopter(KEY, tmp_path, transport, lambda: [member], lambda: OnDisk(0, 0), take)  # type: ignore[arg-type]
    began = trio.current_time()
    with trio.move_on_after(1.3 * adopting.LOOK_FOR_S):
        await adopter.run()
    assert 3_000 < transport.asked[-1] - began <= adopting.LOOK_FOR_S
    assert 10 < len(transport.asked) < 20
