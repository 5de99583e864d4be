"""Checks of rewards by events: who is asked, who is believed, and what the trainer gets meanwhile."""

import math
from collections.abc import Callable

import msgspec
import pytest
from ledger_kit import ALICE, BOB, CAROL, DAVE, KEY_OF, PROMPT, SAMPLING, ask, draw, group_id, ledger_at

from node.engines.base import OPTIONS, RewardAsked, SamplingParams
from node.ledger.messages import Reason, RewardAnswer, RewardClaim, open_rollout, seal_rollout, work_hash
from node.ledger.reward_messages import AskReward
from node.ledger.rules import Ledger
from node.ledger.service import LedgerService
from node.ledger.state import LiveLease
from node.ledger.terms import PLAIN, Terms
from node.ledger.trust.rewards import AT_A_TIME, LOOK_S, LOST_S, SILENT, OpenRewardCheck

REWARDED = SAMPLING.with_options(reward=RewardAsked("r", b'{"answer":"42"}'))
ONE, OTHER = "1" * 16, "2" * 16
RIGHT, WRONG = 1.0, 0.5


def able(digest: str = ONE) -> frozenset[str]:
    return frozenset({OPTIONS, f"reward:r@{digest}"})


class Scene:
    """A ledger with one group of `n` samples, whose reward the nodes of `digests` can compute."""

    def __init__(
        self, digests: dict[bytes, str], n: int = 1, sampling: SamplingParams = REWARDED, terms: Terms = PLAIN
    ) -> None:
        self.ledger = ledger = ledger_at(groups=0)
        self.now = 0.0
        for node, digest in digests.items():
            ledger.nodes[node].abilities = able(digest)
        ledger.quarantine.nodes_changed()
        ledger.tick(0.0)
        self.sampling = sampling
        ledger.offer(group_id(0), "s", PROMPT, n, sampling, terms=terms)

    @property
    def rewards(self):
        return self.ledger.quarantine.rewards

    def lease(self, node: bytes, capacity: int = 8) -> LiveLease:
        leases = self.ledger.request_work(node, ask(capacity), self.now)
        assert isinstance(leases, list)
        return leases[0]

    def deliver(self, lease: LiveLease, sample: int = 0, value: float | None = RIGHT, **changes: object):
        claim = RewardClaim(value, "" if value is not None else "it failed")
        work = work_hash(lease.group, sample, PROMPT, self.sampling)
        tokens = (8 + sample, 9, 2)
        rollout = draw(lease, sample, token_ids=tokens, **({"work": work, "reward": claim} | changes))
        return self.ledger.submit(lease.node, rollout, seal_rollout(KEY_OF[lease.node], rollout), self.now)

    def due(self) -> list[tuple[bytes, OpenRewardCheck]]:
        return self.rewards.due(self.now)

    def answer(self, node: bytes, check: OpenRewardCheck, value: float | None = RIGHT, declined: bool = False) -> None:
        self.rewards.answer(node, RewardAnswer(check.id, value, declined), self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.tick(self.now)

    @property
    def group(self):
        return self.ledger.groups[group_id(0)]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        counts = self.rewards.counts
        return counts.checked, counts.unchecked, counts.wrong, counts.disputed


ALL = {ALICE: ONE, BOB: ONE, CAROL: ONE, DAVE: ONE}


# ------------------------------------------------------------ which nodes get such work


def test_work_with_a_reward_goes_only_to_nodes_that_have_it() -> None:
    scene = Scene({BOB: ONE})
    assert scene.ledger.request_work(ALICE, ask(4), 0.0) is Reason.NO_WORK
    scene.ledger.nodes[ALICE].abilities = frozenset({OPTIONS, "reward:r", "reward:q@" + ONE})
    scene.ledger.quarantine.nodes_changed()
    scene.ledger.tick(0.0)
    assert scene.ledger.request_work(ALICE, ask(4), 0.0) is Reason.NO_WORK, "a bare name says nothing"
    assert scene.lease(BOB).samples == (0,)


def test_of_two_functions_with_one_name_the_one_that_most_nodes_have_counts() -> None:
    scene = Scene({ALICE: ONE, BOB: OTHER, CAROL: OTHER})
    assert scene.rewards.functions.chosen == {"r": OTHER}
    assert {name: dict(counts) for name, counts in scene.rewards.functions.differing.items()} == {
        "r": {ONE: 1, OTHER: 2}
    }
    assert scene.ledger.request_work(ALICE, ask(4), 0.0) is Reason.NO_WORK
    assert scene.lease(BOB).samples == (0,)


def test_a_function_that_counts_stays_until_another_has_more_nodes() -> None:
    scene = Scene({ALICE: ONE})
    for node, digest, chosen in ((BOB, OTHER, ONE), (CAROL, OTHER, OTHER), (DAVE, ONE, OTHER)):
        scene.ledger.nodes[node].abilities = able(digest)
        scene.ledger.quarantine.nodes_changed()
        scene.wait(1.0)
        assert scene.rewards.functions.chosen == {"r": chosen}
    scene.ledger.quarantine.quarantine(CAROL, "by hand", None, scene.now)
    scene.wait(1.0)
    assert scene.rewards.functions.chosen == {"r": ONE}
    assert "reward:r" not in (scene.ledger.nodes[BOB].abilities or ())


def test_a_trainer_can_ask_for_one_function_by_its_digest() -> None:
    pinned = SAMPLING.with_options(reward=RewardAsked(f"r@{OTHER}"))
    scene = Scene({ALICE: ONE, BOB: ONE, CAROL: OTHER, DAVE: OTHER}, sampling=pinned)
    assert scene.ledger.request_work(ALICE, ask(4), 0.0) is Reason.NO_WORK
    scene.deliver(scene.lease(CAROL))
    assert [node for node, _ in scene.due()] == [DAVE]


# ------------------------------------------------------------ what a rollout has to say


@pytest.mark.parametrize(
    "claim",
    [
        None,
        RewardClaim(math.nan),
        RewardClaim(math.inf),
        RewardClaim(-math.inf),
        RewardClaim(1.0, "and a reason"),
        RewardClaim(None),
        RewardClaim(None, "a\x1b[2Jb"),
    ],
)
def test_a_claim_is_a_finite_number_or_has_a_reason(claim: RewardClaim | None) -> None:
    scene = Scene(ALL)
    assert scene.deliver(scene.lease(ALICE), reward=claim) is Reason.MALFORMED
    assert not scene.rewards.open


def test_a_reward_that_nobody_asked_for_is_malformed() -> None:
    ledger = ledger_at(n=1)
    leases = ledger.request_work(ALICE, ask(4), 0.0)
    assert isinstance(leases, list)
    rollout = draw(leases[0], 0, reward=RewardClaim(1.0))
    assert ledger.submit(ALICE, rollout, seal_rollout(KEY_OF[ALICE], rollout), 0.0) is Reason.MALFORMED


def test_the_signature_covers_the_reward_and_older_rollouts_are_encoded_as_before() -> None:
    scene = Scene(ALL)
    lease = scene.lease(ALICE)
    plain = draw(lease, 0)
    paid = msgspec.structs.replace(plain, reward=RewardClaim(0.25))
    key = KEY_OF[ALICE]
    assert open_rollout(ALICE, seal_rollout(key, paid)) == paid
    assert open_rollout(ALICE, seal_rollout(key, plain)) == plain
    assert len(seal_rollout(key, plain)) + 2 < len(seal_rollout(key, paid))
    assert b"answer" not in seal_rollout(key, paid), "the metadata is covered by the hash of the work"
    asked = REWARDED.with_options(reward=RewardAsked("r", b'{"answer":"43"}'))
    assert work_hash(group_id(0), 0, PROMPT, asked) != work_hash(group_id(0), 0, PROMPT, REWARDED)


# ------------------------------------------------------------ checks


def test_a_group_waits_until_another_node_has_computed_the_same() -> None:
    scene = Scene(ALL)
    assert scene.deliver(scene.lease(ALICE)) is None
    ((node, check),) = scene.due()
    assert node != ALICE
    assert scene.due() == [], "it is asked once"
    assert set(scene.rewards.waiting) == {group_id(0)}
    scene.answer(node, check)
    assert not scene.rewards.waiting
    assert scene.group.reward_checks == {0: "checked"}
    assert scene.counts == (1, 0, 0, 0)


@pytest.mark.parametrize("value", [RIGHT, -0.0, 1e300, None])
def test_the_same_is_the_same_bits_or_no_number_twice(value: float | None) -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE), value=value)
    ((node, check),) = scene.due()
    scene.answer(node, check, value)
    assert scene.group.reward_checks == {0: "checked"}


@pytest.mark.parametrize("nodes", [3, 4])
def test_one_dishonest_author_gets_no_reward_through_and_is_quarantined(nodes: int) -> None:
    scene = Scene(dict(list(ALL.items())[:nodes]))
    for lies in range(1, 4):
        scene.deliver(scene.lease(ALICE), value=math.nextafter(RIGHT, 2.0))
        asked = []
        while group_id(0) in scene.rewards.waiting:
            for node, check in scene.due():
                asked.append(node)
                scene.answer(node, check)
        assert len(set(asked)) == nodes - 1, "all others are asked, where they are three at most"
        assert scene.counts == (0, 0, lies, 0)
        assert scene.group.free == {0}
        penalty = scene.ledger.nodes[ALICE].reputation.penalty
        assert (penalty is not None) == (lies == 3)
    assert penalty is not None
    assert "3 of the rewards in its last" in penalty.why
    assert penalty.until is not None
    assert scene.ledger.nodes[ALICE].unused[Reason.WRONG_REWARD] == 3
    assert all(scene.ledger.nodes[node].reputation.penalty is None for node in (BOB, CAROL, DAVE))


def test_one_dishonest_checker_changes_nothing_and_is_quarantined() -> None:
    scene = Scene({ALICE: ONE, BOB: ONE, CAROL: ONE}, n=64)
    lease = scene.lease(ALICE, 64)
    sample = caught = 0
    while scene.ledger.nodes[BOB].reputation.penalty is None:
        scene.deliver(lease, sample)
        while scene.rewards.waiting:
            for node, check in scene.due():
                scene.answer(node, check, WRONG if node == BOB else RIGHT)
                caught += node == BOB
        assert scene.group.reward_checks[sample] == "checked"
        sample += 1
    assert caught == 3
    assert scene.counts == (sample, 0, 0, 0)


def test_a_node_without_a_number_is_outvoted_and_not_blamed() -> None:
    scene = Scene(ALL)
    for _ in range(4):
        scene.deliver(scene.lease(ALICE), value=None)
        for _ in range(3):
            ((node, check),) = scene.due()
            scene.answer(node, check)
    assert scene.counts == (0, 0, 4, 0)
    assert scene.ledger.nodes[ALICE].reputation.penalty is None


def test_a_node_that_cannot_compute_it_now_is_passed_over() -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE))
    ((first, check),) = scene.due()
    scene.answer(first, check, declined=True)
    ((second, _),) = scene.due()
    assert second != first
    scene.answer(second, check, math.nan)  # a number that is none is no answer
    ((third, _),) = scene.due()
    assert len({ALICE, first, second, third}) == 4
    scene.answer(third, check)
    assert scene.counts == (1, 0, 0, 0)


def test_a_node_that_does_not_answer_is_passed_over_after_a_while() -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE))
    ((first, check),) = scene.due()
    scene.wait(LOST_S - 2.0)
    assert scene.due() == []
    scene.wait(2.0 + LOOK_S)
    ((second, _),) = scene.due()
    assert second != first
    scene.answer(first, check)  # late, and still an answer
    assert scene.counts == (1, 0, 0, 0)
    scene.answer(second, check, WRONG)  # nobody asks any more
    assert scene.counts == (1, 0, 0, 0)


def test_a_node_that_joins_again_was_asked_nothing_so_another_is_asked_at_once() -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE))
    [(first, check)] = scene.due()
    scene.rewards.joined_again(first, scene.now)
    [(second, again)] = scene.due()
    assert (again, second not in {ALICE, first}) == (check, True)
    scene.answer(second, check)
    assert scene.counts == (1, 0, 0, 0)
    assert not scene.rewards.waiting


def test_the_service_asks_another_node_when_one_that_was_asked_joins_again() -> None:
    scene = Scene(ALL)
    service = LedgerService(
        scene.ledger, None, None, clock=lambda: scene.now,  # pyright: ignore - neither is written nor sent to here
        is_member=lambda node: node in ALL,
    )  # fmt: skip

    def asked() -> list[bytes]:
        return [node for node, message in service.begin_turn().outbox if isinstance(message, AskReward)]

    scene.deliver(scene.lease(ALICE))
    [first] = asked()
    service.member_up(next(node for node in ALL if node not in (ALICE, first)))  # which was asked nothing
    assert asked() == []
    service.member_up(first)
    [second] = asked()
    assert second not in (ALICE, first)


def test_a_node_that_joins_again_is_asked_once_more_where_there_is_no_other() -> None:
    scene = Scene({ALICE: ONE, BOB: ONE})
    scene.deliver(scene.lease(ALICE))
    [(_, check)] = scene.due()
    scene.rewards.joined_again(BOB, scene.now)
    assert scene.due() == [(BOB, check)]
    scene.wait(LOST_S - 2.0)
    assert scene.due() == [], "now it has time to answer"
    scene.answer(BOB, check)
    assert scene.counts == (1, 0, 0, 0)


def test_a_node_that_joins_again_and_again_is_taken_for_one_that_does_not_answer() -> None:
    scene = Scene({ALICE: ONE, BOB: ONE})
    scene.deliver(scene.lease(ALICE))
    for _ in range(2):
        [(node, _)] = scene.due()
        scene.rewards.joined_again(node, scene.now)
    assert scene.due() == []
    assert scene.counts == (0, 1, 0, 0)


def test_a_node_that_joins_again_to_answer_nothing_is_soon_not_asked() -> None:
    scene = Scene({ALICE: ONE, BOB: ONE, CAROL: ONE}, n=200)
    lease, asked = scene.lease(ALICE, 200), 0
    for sample in range(100):
        scene.deliver(lease, sample)
        while due := scene.due():
            for node, check in due:
                if node == BOB:
                    asked += 1
                    scene.rewards.joined_again(BOB, scene.now)
                else:
                    scene.answer(node, check)
    assert asked == SILENT
    assert scene.counts == (100, 0, 0, 0)


def test_a_node_that_never_answers_holds_up_a_few_groups_and_then_none() -> None:
    scene = Scene({ALICE: ONE, BOB: ONE, CAROL: ONE}, n=200)
    lease, asked = scene.lease(ALICE, 200), 0
    for sample in range(100):
        scene.deliver(lease, sample)
        for _ in range(40):
            for node, check in scene.due():
                if node == CAROL:
                    scene.answer(node, check)
                asked += node == BOB
            if not scene.rewards.waiting:
                break
            scene.wait(LOOK_S)
        scene.ledger.transitions.discard(scene.group, sample, Reason.TOO_OLD)
    assert asked < 100 * 0.3
    assert scene.counts == (100, 0, 0, 0)


@pytest.mark.parametrize("change", ["before the sample comes", "after it"])
def test_a_node_that_declares_another_function_after_its_lease_is_checked_by_the_one_it_had(change: str) -> None:
    scene = Scene(ALL)
    lease = scene.lease(ALICE)
    if change == "after it":
        scene.deliver(lease, value=WRONG)
    scene.ledger.nodes[ALICE].abilities = able(OTHER)
    scene.ledger.quarantine.nodes_changed()
    scene.wait(0.1)
    if change == "before the sample comes":
        scene.deliver(lease, value=WRONG)
    for _ in range(3):
        ((node, check),) = scene.due()
        scene.answer(node, check)
    assert scene.counts == (0, 0, 1, 0)


def test_when_nobody_answers_in_time_the_reward_is_unchecked() -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE))
    asked = []
    for _ in range(200):
        asked += [node for node, _ in scene.due()]
        scene.wait(LOOK_S)
        if not scene.rewards.waiting:
            break
    assert scene.group.reward_checks == {0: "unchecked"}
    assert 118 < scene.now <= 122
    assert set(asked[:3]) == {BOB, CAROL, DAVE}
    assert asked[3:] == asked[:1], "once more, because the question may have been lost"
    assert not scene.rewards._questions


def test_a_node_that_has_just_come_is_waited_for() -> None:
    scene = Scene({ALICE: ONE})
    scene.ledger.request_work(BOB, ask(4), 0.0)  # it generates, and has not said what it can do
    scene.deliver(scene.lease(ALICE))
    assert scene.due() == []
    assert scene.rewards.waiting
    scene.ledger.nodes[BOB].abilities = able()
    scene.ledger.quarantine.nodes_changed()
    assert [node for node, _ in scene.due()] == [BOB]


def test_a_node_of_an_older_release_is_not_waited_for() -> None:
    scene = Scene({ALICE: ONE})
    scene.ledger.request_work(BOB, ask(4), 0.0)
    scene.ledger.nodes[BOB].abilities_questions = 4
    scene.deliver(scene.lease(ALICE))
    assert scene.due() == []
    assert scene.group.reward_checks == {0: "unchecked"}


def test_a_node_that_is_alone_with_the_function_has_unchecked_rewards_at_once() -> None:
    scene = Scene({ALICE: ONE, BOB: OTHER})
    assert scene.rewards.functions.chosen == {"r": OTHER}, "of two, one is chosen"
    scene.deliver(scene.lease(BOB))
    assert scene.due() == []
    assert not scene.rewards.waiting
    assert scene.group.reward_checks == {0: "unchecked"}
    assert scene.counts == (0, 1, 0, 0)


def test_two_nodes_that_disagree_cost_the_sample() -> None:
    scene = Scene({ALICE: ONE, BOB: ONE})
    scene.deliver(scene.lease(ALICE))
    ((_, check),) = scene.due()
    scene.answer(BOB, check, WRONG)
    assert scene.due() == []
    assert scene.counts == (0, 0, 0, 1)
    assert scene.group.free == {0}
    assert scene.rewards.disputes == [("r", ALICE, BOB)]
    assert all(scene.ledger.nodes[node].reputation.penalty is None for node in (ALICE, BOB))


def test_a_trainer_that_computes_rewards_itself_gets_what_nodes_dispute() -> None:
    scene = Scene({ALICE: ONE, BOB: ONE}, terms=Terms(arbitrates=True))
    scene.deliver(scene.lease(ALICE))
    ((_, check),) = scene.due()
    scene.answer(BOB, check, WRONG)
    scene.due()
    assert scene.group.reward_checks == {0: "disputed"}
    assert scene.group.complete
    assert scene.ledger.quarantine.accuse(group_id(0), 0, "its reward is 0.5, and not 1.0", scene.now)
    assert scene.ledger.nodes[ALICE].reputation.penalty is not None
    assert scene.group.free == {0}


def test_two_that_collude_cannot_have_an_honest_node_blamed_where_there_are_five() -> None:
    scene = Scene(ALL)
    eve = b"e" * 32
    scene.ledger.member_up(eve)
    scene.ledger.nodes[eve].abilities = able()
    scene.wait(1.0)
    for _ in range(8):
        scene.deliver(scene.lease(ALICE))
        while scene.rewards.waiting:
            for node, check in scene.due():
                scene.answer(node, check, WRONG if node in (DAVE, eve) else RIGHT)
        assert scene.group.reward_checks == {0: "checked"}
        scene.ledger.transitions.discard(scene.group, 0, Reason.TOO_OLD)
        for node in (DAVE, eve):
            scene.ledger.nodes[node].reputation.clear()
    assert scene.ledger.nodes[ALICE].reputation.penalty is None


def test_three_that_all_differ_are_a_dispute() -> None:
    scene = Scene({ALICE: ONE, BOB: ONE, CAROL: ONE})
    scene.deliver(scene.lease(ALICE))
    for value in (WRONG, 0.25):
        ((node, check),) = scene.due()
        scene.answer(node, check, value)
    assert scene.due() == []
    assert scene.counts == (0, 0, 0, 1)


# ------------------------------------------------------------ nodes and groups that go


def leave(scene: Scene, node: bytes) -> None:
    scene.ledger.member_lost(node, scene.now)


def penalize(scene: Scene, node: bytes) -> None:
    scene.ledger.quarantine.quarantine(node, "by hand", None, scene.now)


@pytest.mark.parametrize("end", [leave, penalize])
def test_another_node_is_asked_in_the_place_of_one_that_is_gone(end: Callable[[Scene, bytes], None]) -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE))
    ((first, check),) = scene.due()
    end(scene, first)
    ((second, _),) = scene.due()
    assert second not in (ALICE, first)
    scene.answer(first, check, WRONG)
    assert not check.found, "it was told that it is not asked any more"
    scene.answer(second, check)
    assert scene.counts == (1, 0, 0, 0)


def test_the_author_may_be_gone_before_its_reward_is_checked() -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE))
    leave(scene, ALICE)
    ((node, check),) = scene.due()
    scene.answer(node, check)
    assert scene.group.reward_checks == {0: "checked"}


def test_a_check_ends_with_its_rollout() -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE))
    ((node, check),) = scene.due()
    scene.ledger.transitions.discard(scene.group, 0, Reason.TOO_OLD)
    scene.answer(node, check)
    assert scene.counts == (0, 0, 0, 0)
    assert not scene.rewards.open
    scene.deliver(scene.lease(BOB))
    scene.due()
    scene.ledger.drop(group_id(0))
    scene.wait(LOOK_S)
    assert not scene.rewards.open
    assert not scene.rewards.waiting
    assert not scene.rewards._questions
    assert scene.rewards.next_deadline() is None


def test_a_new_rollout_for_a_sample_ends_the_check_of_the_old_one() -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE))
    scene.due()
    scene.ledger.transitions.discard(scene.group, 0, Reason.TOO_OLD)
    scene.deliver(scene.lease(BOB))
    assert len(scene.rewards.open) == 1
    ((node, check),) = scene.due()
    assert node != BOB
    scene.answer(node, check)
    assert scene.group.reward_checks == {0: "checked"}
    assert not scene.rewards.waiting


def test_after_a_restart_rewards_are_checked_when_the_nodes_are_back() -> None:
    scene = Scene(ALL)
    scene.deliver(scene.lease(ALICE))
    later = Ledger(scene.ledger.settings, scene.ledger.head)
    group = scene.group
    group.since = 1000.0
    later.adopt(group)
    later.tick(1000.0)
    assert later.quarantine.rewards.due(1000.0) == []
    assert set(later.quarantine.rewards.waiting) == {group_id(0)}, "nodes find a restarted seed within a minute"
    later.member_up(BOB)
    later.nodes[BOB].abilities = able()
    later.quarantine.nodes_changed()
    later.tick(1010.0)
    ((node, check),) = later.quarantine.rewards.due(1010.0)
    assert node == BOB
    later.quarantine.rewards.answer(BOB, RewardAnswer(check.id, RIGHT), 1010.0)
    assert not later.quarantine.rewards.waiting


def test_a_node_has_a_bounded_number_of_questions() -> None:
    scene = Scene({ALICE: ONE, BOB: ONE}, n=2 * AT_A_TIME)
    lease = scene.lease(ALICE, 2 * AT_A_TIME)
    for sample in range(2 * AT_A_TIME):
        assert scene.deliver(lease, sample) is None
    due = scene.due()
    assert len(due) == AT_A_TIME
    assert scene.due() == []
    for node, check in due:
        scene.answer(node, check)
    assert len(scene.due()) == AT_A_TIME


def test_checks_are_dealt_over_the_nodes_and_nobody_can_tell_to_whom() -> None:
    scene = Scene(ALL, n=30)
    lease = scene.lease(ALICE, 30)
    for sample in range(30):
        scene.deliver(lease, sample)
    asked = [node for node, _ in scene.due()]
    assert {node: asked.count(node) > 2 for node in (BOB, CAROL, DAVE)} == dict.fromkeys((BOB, CAROL, DAVE), True)
    other = Ledger(scene.ledger.settings, scene.ledger.head, b"x" * 32)
    assert other.quarantine.rewards._secret != scene.rewards._secret
