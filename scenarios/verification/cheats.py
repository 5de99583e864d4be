"""Really cheating nodes among honest ones: how many checked tokens each attack delivers until it is in quarantine.

A seed, honest nodes and cheating ones (`scenarios.verification.cheating`), each a real process with a real engine, and
a trainer that makes real GRPO steps of a small model. The cheating nodes are honest until the swarm has learned what
honest numbers are like; then each acts out one attack after the other. Found ones are released by hand, as a person
would do, and their evidence begins anew. Tokens, samples and opinions count from the moment when a node begins to
cheat.

    python -m scenarios.verification.cheats                                       # all attacks, on transformers
    python -m scenarios.verification.cheats --attacks stale no_end                # two of them
    python -m scenarios.verification.cheats --engine vllm --honest 3 --cheats 1 --attacks stale temperature
    python -m scenarios.verification.cheats --lr 1e-5 --most-tokens 2000 --json   # larger steps, a lower limit

Exit code 1: an attack was not found within the limit, or an honest node is in quarantine. Some lies of checkers are no
opinions at all, or true; their nodes have to harm nobody, and need not be found. On two cores all attacks take some
minutes; each node takes 0.6 GB, with vLLM 2 GB.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from codec.errors import UsageError
from node.status.progress import ProgressLine
from scenarios.harness.command import json_parser, run_as_program
from scenarios.verification.cheating import ATTACKS, FORMATS, LIES

__all__ = ["HARMLESS", "Trials", "act_out", "engine_words"]

HARMLESS: Final = frozenset(LIES) - {"judges_all_false"}
"""Lies that cost nobody anything: no answers, or answers that are true of honest nodes."""
WITH_A_VERSION: Final = frozenset({"stale", *FORMATS})
"""Attacks that begin when the engine commits the next version."""
HARMLESS_STEPS: Final = 2
"""Versions for which such a checker lies."""
MOST_OPINIONS: Final = 1000
"""Of a lying checker, until it has to be found."""
MOST_TOKENS: Final = 8192
"""Checked of a cheating author, until it has to be found."""
MOST_STEPS: Final = 400
"""Versions of one run. Ends a run in which a cheat is not checked any more."""
LEAST_LEARNING: Final = 8
"""Versions in which all are honest, so that each node has some numbers."""
MOST_LEARNING: Final = 80
"""Versions until every node of the swarm is compared with honest numbers."""


Say = Callable[[str], None]


class Counts(NamedTuple):
    """What the seed has counted of a node."""

    samples: int
    """Accepted."""
    checks: int
    """Opinions of others on them."""
    tokens: int
    """Checked, whatever the number of opinions on them."""
    opinions: int
    """That it gave."""
    versions: int

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class _Trial(NamedTuple):
    attack: str
    began: Counts | None
    """None: it begins with the next version."""


class Trials:
    """Attacks, acted out one after the other by the cheating nodes of a `RealSwarm`. `rows`: what became of them."""

    def __init__(self, arena: Any, most_tokens: int, say: Say = lambda line: None) -> None:
        self.arena = arena
        self.rows: list[dict[str, Any]] = []
        self.harmed: dict[str, str] = {}
        """Why nodes are in quarantine that were honest."""
        self._most_tokens = most_tokens
        self._say = say
        self._trials: dict[str, _Trial] = {}
        self._found: list[str] = []
        """Nodes in quarantine, to be released after the next version."""

    def learn(self, versions: int | None) -> None:
        """Publish so many versions with all nodes honest; None: until the samples of each node are compared."""
        for done in range(MOST_LEARNING if versions is None else versions):
            if versions is None and done >= LEAST_LEARNING and all(map(self._is_measured, self.arena.cheats)):
                return
            self._step("all are honest")

    def _is_measured(self, name: str) -> bool:
        evidence = self.arena.member(name).evidence
        return evidence is not None and bool(evidence.kinds)

    def run(self, attacks: Sequence[str]) -> None:
        """Act out these attacks. Ends early when an honest node is in quarantine."""
        left, last = list(attacks), self.arena.version + MOST_STEPS
        while (left or self._trials or self._found) and not self.harmed and self.arena.version < last:
            for name in self.arena.cheats:
                if left and name not in self._trials and name not in self._found:
                    self._begin(name, left.pop(0))
            released = list(self._found)
            self._step(", ".join(self._progress()))
            for name in released:
                self.arena.release(name)
                self._found.remove(name)
            for name in list(self._trials):
                self._look_at(name)
        for name in list(self._trials):
            self._end(name, failed="the run ended before it was found")
        self.rows += [{"attack": attack, "failed": "not begun"} for attack in left]

    def _begin(self, name: str, attack: str) -> None:
        self._trials[name] = _Trial(attack, None if attack in WITH_A_VERSION else self._counts(name))
        self.arena.tell(name, attack)

    def _step(self, what: str) -> None:
        began = time.monotonic()
        self.arena.step()
        self._say(
            f"version {self.arena.version} ({self.arena.density:.2%} changed, {time.monotonic() - began:.0f} s): {what}"
        )
        for node in self.arena.swarm.seed_status().nodes:
            if node.quarantine is not None and node.name not in self._trials and node.name not in self._found:
                self.harmed[node.name] = node.quarantine.why

    def _progress(self) -> Iterator[str]:
        for name, trial in self._trials.items():
            counts = self._since(name, trial)
            amount = f"{counts.opinions} opinions" if trial.attack in LIES else f"{counts.tokens} tokens"
            yield f"{trial.attack} {amount}"

    def _counts(self, name: str) -> Counts:
        node = self.arena.member(name)
        evidence = node.evidence
        judged = (0, 0, 0) if evidence is None else (evidence.checks, evidence.tokens, evidence.opinions)
        return Counts(node.accepted, *judged, self.arena.version)

    def _since(self, name: str, trial: _Trial) -> Counts:
        now = self._counts(name)
        return now.since(now if trial.began is None else trial.began)

    def _look_at(self, name: str) -> None:
        attack = self._trials[name].attack
        penalty, counts = self.arena.member(name).quarantine, self._since(name, self._trials[name])
        if penalty is None and self._trials[name].began is None:
            self._trials[name] = _Trial(attack, self._counts(name))
        elif penalty is not None:
            self._found.append(name)
            self._end(name, why=penalty.why)
        elif attack in HARMLESS and counts.versions >= HARMLESS_STEPS:
            self._end(name, why="harmless")
        elif counts.tokens > self._most_tokens and attack not in LIES:
            self._end(name, failed=f"not found in {counts.tokens:,} tokens")
        elif counts.opinions > MOST_OPINIONS and attack in LIES:
            self._end(name, failed=f"not found in {counts.opinions:,} opinions")

    def _end(self, name: str, **outcome: str) -> None:
        trial = self._trials.pop(name)
        self.arena.tell(name, "")
        counts = self._since(name, trial)
        self.rows.append({"attack": trial.attack, "node": name, **counts._asdict(), **outcome})


def engine_words(engine: str) -> tuple[str, ...]:
    """The flags of `swarm-node join` for an engine on CPUs."""
    if engine == "transformers":
        return ("--device", "cpu")
    from scenarios.engines.vllm_environment import vllm_python

    vllm = ("--engine", "vllm", "--vllm-python", str(vllm_python()), "--engine-port", "0", "--running", "recompute")
    small = ("--max-model-len=64", "--max-num-seqs=16", "--num-gpu-blocks-override=64")  # a gigabyte less for each
    return (*vllm, *(f"--vllm-arg={flag}" for flag in small))


def act_out(
    folder: Path,
    attacks: Sequence[str],
    *,
    engine: str = "transformers",
    honest: int = 5,
    cheats: int = 2,
    lr: float = 1e-6,
    check_share: float = 1.0,
    honest_until: int | None = None,
    most_tokens: int = MOST_TOKENS,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Run a swarm in `folder` in which the attacks are acted out; returns what `--json` prints. `say`: gets a line
    about each version."""
    from scenarios.verification.real_swarm import LEASED_TOP_P, real_swarm

    began = time.monotonic()
    numbers = {"honest": honest, "cheats": cheats, "lr": lr}
    with real_swarm(folder, engine=engine_words(engine), check_share=check_share, **numbers) as arena:
        trials = Trials(arena, most_tokens, say)
        for top_p in (1.0, LEASED_TOP_P):
            some = [attack for attack in attacks if (attack == "top_p") == (top_p < 1.0)]
            if some and not trials.harmed:
                arena.top_p = top_p
                trials.learn(honest_until)
                trials.run(some)
        checks = arena.swarm.seed_status().work.checks
        return {
            "scenario": "verification_cheats",
            "engine": engine,
            **numbers,
            "versions": arena.version,
            "judged": checks.judged,
            "not_judged": checks.not_judged,
            "honest_in_quarantine": trials.harmed,
            "rows": trials.rows,
            "seconds": time.monotonic() - began,
        }


def _table(result: dict[str, Any]) -> str:
    lines = [f"{'attack':<24}{'engine':<14}{'tokens':>7}{'samples':>9}{'opinions':>10}   why"]
    for row in result["rows"]:
        tokens, samples = row.get("tokens", ""), row.get("samples", "")
        opinions = row.get("opinions", "") if row["attack"] in LIES else row.get("checks", "")
        why = f"FAILED: {row['failed']}" if "failed" in row else row["why"]
        lines.append(f"{row['attack']:<24}{result['engine']:<14}{tokens:>7}{samples:>9}{opinions:>10}   {why}")
    harmed = result["honest_in_quarantine"]
    lines += [
        "",
        f"{result['versions']} versions at a learning rate of {result['lr']:g}, {result['judged']} samples judged, "
        f"{result['not_judged']} not in time, {result['seconds']:.0f} s",
        f"honest nodes in quarantine: {len(harmed)} of {result['honest']}",
        *(f"  {name}: {why}" for name, why in harmed.items()),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = json_parser(f"{__doc__}\nAttacks:\n" + "".join(f"  {name:<24}{what}\n" for name, what in ATTACKS.items()))
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--attacks", nargs="+", choices=tuple(ATTACKS), help="default: all that the engine can")
    parser.add_argument("--honest", type=int, default=5, help="honest nodes (default 5)")
    parser.add_argument("--cheats", type=int, default=2, help="cheating nodes at a time (default 2)")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of the GRPO steps (default 1e-6)")
    parser.add_argument("--check-share", type=float, default=1.0, help="as of the seed (default 1)")
    parser.add_argument(
        "--honest-until", type=int, help="versions in which all are honest (default: until the class is learned)"
    )
    parser.add_argument(
        "--most-tokens",
        type=int,
        default=MOST_TOKENS,
        help=f"checked tokens until an attack has to be found (default {MOST_TOKENS:,})",
    )
    parser.add_argument("--folder", type=Path, help="keep the logs of all processes here")
    options = parser.parse_args(arguments)
    if options.honest < 3 or options.cheats < 1:
        parser.error("--honest: at least 3, so that a cheat has three checkers; --cheats: at least 1")
    attacks = options.attacks or [name for name in ATTACKS if options.engine != "vllm" or name not in FORMATS]
    if options.engine == "vllm" and (wrong := sorted(set(attacks) & set(FORMATS))):
        raise UsageError(f"{', '.join(wrong)}: vLLM's weights are not rounded here. Use --engine transformers.")
    with ProgressLine("starting the swarm") as progress, tempfile.TemporaryDirectory(prefix="cheats-") as scratch:

        def say(line: str) -> None:
            progress.label = line

        result = act_out(
            options.folder or Path(scratch),
            attacks,
            engine=options.engine,
            honest=options.honest,
            cheats=options.cheats,
            lr=options.lr,
            check_share=options.check_share,
            honest_until=options.honest_until,
            most_tokens=options.most_tokens,
            say=say,
        )
    print(json.dumps(result, indent=1) if options.json else _table(result))
    return 1 if result["honest_in_quarantine"] or any("failed" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    run_as_program(main)
