"""The order of attacks, and what is counted of them, in a swarm that is made up. Real ones: tests/processes."""

from types import SimpleNamespace
from typing import Any

import pytest

from node.status.schema import EvidenceStatus, MemberStatus, QuarantineStatus
from scenarios.verification.cheats import HARMLESS_STEPS, LEAST_LEARNING, Trials, main


class Arena:
    """Each version, every node has 4 samples of 10 tokens judged by two others. `found_after`: versions of an attack
    until its node is in quarantine."""

    def __init__(self, **found_after: int) -> None:
        self.cheats, self.found_after = ("cheat1", "cheat2"), found_after
        self.version, self.density = 0, 0.01
        self.nodes = {name: MemberStatus(name=name, evidence=EvidenceStatus()) for name in ("honest1", *self.cheats)}
        self.attacks: dict[str, tuple[str, int]] = {}
        self.told: list[tuple[str, str]] = []
        self.released: list[str] = []
        self.harmed_at = -1
        self.swarm = SimpleNamespace(seed_status=lambda: SimpleNamespace(nodes=list(self.nodes.values())))

    def member(self, name: str) -> MemberStatus:
        return self.nodes[name]

    def tell(self, name: str, attack: str) -> None:
        self.told.append((name, attack))
        self.attacks[name] = (attack, self.version)

    def release(self, name: str) -> None:
        self.released.append(name)
        self.nodes[name].quarantine, self.nodes[name].evidence = None, EvidenceStatus()

    def step(self) -> None:
        self.version += 1
        for name, node in self.nodes.items():
            evidence: Any = node.evidence
            node.accepted += 4
            evidence.checks, evidence.tokens, evidence.opinions = (
                evidence.checks + 8, evidence.tokens + 80, evidence.opinions + 8,
            )  # fmt: skip
            evidence.kinds = {"unlike": 1.0}
            attack, since = self.attacks.get(name, ("", 0))
            if attack and self.version - since >= self.found_after.get(attack, 1000):
                node.quarantine = QuarantineStatus(why=f"it did {attack}")
        if self.version == self.harmed_at:
            self.nodes["honest1"].quarantine = QuarantineStatus(why="bad luck")


def run(arena: Arena, *attacks: str, most_tokens: int = 1000) -> Trials:
    trials = Trials(arena, most_tokens)
    trials.learn(2)
    trials.run(attacks)
    return trials


def test_each_attack_is_acted_out_and_counted_from_its_beginning():
    arena = Arena(stale=4, no_end=2, replayed=1)
    rows = {row["attack"]: row for row in run(arena, "no_end", "stale", "replayed").rows}
    assert {attack: row["why"] for attack, row in rows.items()} == {
        attack: f"it did {attack}" for attack in ("stale", "no_end", "replayed")
    }
    assert (rows["no_end"]["tokens"], rows["no_end"]["samples"], rows["no_end"]["checks"]) == (160, 8, 16)
    assert rows["stale"]["tokens"] == 240, "the first version of a stale node is that of its last honest commit"
    assert rows["replayed"]["tokens"] == 80, "evidence began anew at its node"
    assert sorted(arena.released) == ["cheat1", "cheat1", "cheat2"]
    assert arena.told[:2] == [("cheat1", "no_end"), ("cheat2", "stale")]
    assert arena.told[-1][1] == "", "a node that was found is honest again"


def test_what_is_not_found_within_the_limit_has_failed():
    (row,) = run(Arena(), "claims", most_tokens=300).rows
    assert row["failed"] == "not found in 320 tokens"


@pytest.mark.parametrize(("lie", "versions"), [("judges_nan", HARMLESS_STEPS), ("judges_all_false", 126)])
def test_lies_that_are_no_opinions_need_not_be_found_and_others_do(lie: str, versions: int):
    (row,) = run(Arena(), lie).rows
    assert row["versions"] == versions
    assert row.get("why", row.get("failed")) == ("harmless" if lie == "judges_nan" else "not found in 1,008 opinions")


@pytest.mark.parametrize("harmed", ["honest1", "cheat2"])
def test_a_node_that_is_honest_may_not_be_in_quarantine(harmed: str):
    arena = Arena()
    arena.nodes["honest1"], arena.nodes[harmed] = arena.nodes[harmed], arena.nodes["honest1"]
    arena.harmed_at = 4
    trials = run(arena, "stale")
    assert list(trials.harmed.values()) == ["bad luck"]
    assert arena.version == 4
    assert trials.rows[0]["failed"] == "the run ended before it was found"


def test_nodes_are_honest_until_all_are_compared_with_others():
    arena = Arena()
    Trials(arena, 100).learn(None)
    assert arena.version == LEAST_LEARNING
    assert not arena.told


@pytest.mark.parametrize("words", [["--honest", "2"], ["--cheats", "0"], ["--attacks", "unheard"]])
def test_what_cannot_be_run_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err
