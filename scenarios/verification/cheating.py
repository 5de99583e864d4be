"""A node that cheats, or lies as a checker: `swarm-node join`, with an engine client that does not do what it was told.

    SWARM_HOME=FOLDER python -m scenarios.verification.cheating join TICKET --model BASE --name box

The words are those of `swarm-node`. What the node does stands in the file `attack` of its home, which may change at any
time: a key of `ATTACKS`, `BASE_ALONE`, or nothing while it is honest. `scenarios.verification.cheats` runs swarms of
such nodes.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import trio

from codec.adapter import AdapterConfig
from node.engines.base import MIN_LOGPROB, REPLAYS, Completion, Prompt, SamplingParams, Version
from node.engines.host import Commitment, Counts
from node.engines.judgement import Claim, Judgement
from node.engines.link import Draws, EngineFailed, EngineLost
from node.engines.room import Room
from node.member.engine_client import EngineClient
from swarm.protocol.core.events import VersionId

__all__ = ["ATTACKS", "BASE_ALONE", "FORMATS", "LIES", "CheatingClient", "attack_file", "main", "read_attack"]

FORMATS: Final = ("fp8", "int8", "int4")
"""Of `scenarios.verification.models`, which needs torch."""
OTHER: Final = 1 << 40
"""Added to a stream: noise that nobody leased."""
COOLER: Final = 0.9
"""The temperature of the attack, as a share of the leased one."""
FAKED_LOGPROB: Final = -8.0
"""What a cheat claims for a token that the leased sampling cannot draw, in nats."""

LOOK_EVERY_S: Final = 0.5
"""Interval at which a checker that does not answer looks whether it is honest again."""
QUANTISING: Final = "scenarios.verification.quantising:QuantisingEngine"
"""The engine of cheats that run transformers."""

LIES: Final = {
    "judges_all_false": "finds every sample of others false: scores one nat lower, and margins of half a nat",
    "judges_all_true": "finds that every token of others wins its draw",
    "judges_nan": "answers numbers that are none",
    "judges_longer": "answers one number too many",
    "judges_another_version": "answers scores of the version after",
    "judges_never": "does not answer",
}
"""What lying checkers do. As authors they are honest."""

ATTACKS: Final = {
    "stale": "its engine stays one version behind, and it says that it is not",
    "best_of_two": "draws two samples and delivers the likelier one",
    "no_end": "never draws the end of the text",
    "temperature": f"draws at {COOLER} times the leased temperature",
    "top_p": "draws from all tokens where a top-p was leased",
    "claims": "claims the log-probabilities of the version before",
    "replayed": "delivers the text of another stream",
    **{form: f"its weights are rounded to {form} after each commit" for form in FORMATS},
    **LIES,
}

BASE_ALONE: Final = "base_alone"
"""The attack of a node that draws by the base where an adapter was leased. `ATTACKS` are those of swarms without
adapters."""

_BAD_ANSWERS: Final = ("judges_nan", "judges_longer", "judges_another_version")


def attack_file(home: Path) -> Path:
    """Where a node's present attack is written."""
    return home / "attack"


def read_attack(home: Path) -> str:
    """The node's present attack; empty while it is honest."""
    with contextlib.suppress(OSError):
        return attack_file(home).read_text().strip()
    return ""


class _Patch(NamedTuple):
    """A version that the engine was not given yet. `fd`: of its patch."""

    version: Version
    root: bytes
    fd: int


class _BadAnswer(NamedTuple):
    """A judgement that `Judgement` would refuse."""

    version: Version
    scores: tuple[float, ...]
    previous: tuple[float, ...]
    margins: tuple[float, ...]


class CheatingClient:
    """An `EngineClient` around a real one. `attack()`: what it does now."""

    def __init__(self, engine: EngineClient, attack: Callable[[], str]) -> None:
        self._engine = engine
        self._attack = attack
        self._staged_fd = -1
        """Of the patch that was staged here and not committed; -1: none."""
        self._kept: _Patch | None = None
        """The version that the node says it has, and that its engine has not."""
        self._named: dict[Version, Version] = {}
        """As what the node named the versions that its engine had while it lagged."""

    @property
    def version(self) -> Version:
        """As the node claims it."""
        return self._engine.version if self._is_level else self._claimed.version

    @property
    def root(self) -> bytes:
        """As the node claims it."""
        return self._engine.root if self._is_level else self._claimed.root

    @property
    def _claimed(self) -> _Patch:
        assert self._kept is not None
        return self._kept

    @property
    def _is_level(self) -> bool:
        """The engine has what the node claims: always, except in the attack `stale`. A reload brings it level, too."""
        return self._kept is None or self._engine.version >= self._kept.version

    # ------------------------------------------------------------ the engine's own

    @property
    def preemptible(self) -> bool:
        return self._engine.preemptible

    @property
    def continuous_batching(self) -> bool:
        return self._engine.continuous_batching

    @property
    def room(self) -> Room:
        return self._engine.room

    @property
    def scores(self) -> bool:
        return self._engine.scores

    @property
    def abilities(self) -> frozenset[str]:
        return self._engine.abilities

    @property
    def kind(self) -> str:
        return self._engine.kind

    @property
    def ready(self) -> bool:
        return self._engine.ready

    @property
    def adapters(self) -> Mapping[str, Version]:
        return self._engine.adapters

    async def wait_ready(self) -> None:
        await self._engine.wait_ready()

    async def wait_up(self) -> None:
        await self._engine.wait_up()

    def lacks(self, version: Version) -> bool:
        return self._engine.lacks(version)

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[tuple[float, ...], Version]:
        return await self._engine.score(prompt, token_ids, sampling, adapter)

    async def set_adapter(
        self, slot: int, config: AdapterConfig, fd: int, version: Version, root: bytes
    ) -> float | None:
        return await self._engine.set_adapter(slot, config, fd, version, root)

    async def drop_adapter(self, slot: int) -> None:
        await self._engine.drop_adapter(slot)

    # ------------------------------------------------------------ versions

    async def stage(self, patch_fd: int, version: Version) -> float:
        """Stage the patch, or keep it for later."""
        self._close(self._staged_fd)
        self._staged_fd = os.dup(patch_fd)
        if self._attack() == "stale" or not self._is_level:
            return 0.0
        return await self._engine.stage(patch_fd, version)

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        """Commit `version`, or the one before it and claim that it was this one."""
        fd, self._staged_fd = self._staged_fd, -1
        kept, level = self._kept, self._is_level
        is_stale = self._attack() == "stale"
        try:
            if kept is not None and not level:
                self._named[self._engine.version] = kept.version
                await self._engine.stage(kept.fd, kept.version)
                await self._engine.commit(kept.version, kept.root)
            if is_stale:
                self._kept, fd = _Patch(version, root, fd), -1
                return Commitment(0.0)
            if not level:
                await self._engine.stage(fd, version)
            return await self._engine.commit(version, root)
        finally:
            self._close(fd)
            if not is_stale:
                self._kept = None
            if kept is not None and kept is not self._kept:
                self._close(kept.fd)

    @staticmethod
    def _close(fd: int) -> None:
        if fd >= 0:
            os.close(fd)

    # ------------------------------------------------------------ as an author

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Counts | None = None,
        adapter: str = "",
        draws: Draws | None = None,
    ) -> tuple[Sequence[Completion], float]:
        """Draw as the attack has it. `draws` is called only where the engine's tokens are delivered as they are drawn:
        by an honest author."""
        attack = self._attack()
        told = draws if self._is_level and (not attack or attack in LIES) else None
        if attack == BASE_ALONE:
            adapter = ""
        if attack in ("best_of_two", "replayed"):
            others = [Prompt(prompt.token_ids, prompt.stream + OTHER) for prompt in prompts]
            found, seconds = await self._engine.generate(others, sampling, counts, adapter)
            if attack == "best_of_two":
                drawn, more_s = await self._engine.generate(prompts, sampling, None, adapter)
                pairs = zip(drawn, found, strict=True)
                found, seconds = [max(pair, key=_likelihood) for pair in pairs], seconds + more_s
        else:
            found, seconds = await self._engine.generate(prompts, _drawn_by(attack, sampling), counts, adapter, told)
            if attack in ("temperature", "top_p", "no_end", "claims"):
                rows = zip(prompts, found, strict=True)
                found = [await self._faked(attack, prompt, one, sampling) for prompt, one in rows]
        return [self._as_claimed(one) for one in found], seconds

    async def _faked(self, attack: str, prompt: Prompt, drawn: Completion, leased: SamplingParams) -> Completion:
        """The same tokens with the log-probabilities that a cheat would claim; as drawn where they are not known."""
        of_before = attack == "claims"
        replay = not of_before and REPLAYS in self._engine.abilities
        claim = Claim(prompt.token_ids, drawn.token_ids, leased, prompt.stream, previous=of_before, replay=replay)
        try:
            found = await self._engine.judge(claim)
        except (EngineFailed, EngineLost):
            return drawn
        claimed = found.previous if of_before else found.scores
        if not claimed:
            return drawn
        logprobs = tuple(value if value >= MIN_LOGPROB else FAKED_LOGPROB for value in claimed)
        return msgspec.structs.replace(drawn, logprobs=logprobs)

    def _as_claimed(self, drawn: Completion) -> Completion:
        """Tokens of an engine that lags are named as those of the version that the node claimed."""
        named = self._named if self._is_level else self._named | {self._engine.version: self.version}
        if not named:
            return drawn
        spans = [msgspec.structs.replace(span, version=named.get(span.version, span.version)) for span in drawn.spans]
        return msgspec.structs.replace(drawn, spans=tuple(spans))

    # ------------------------------------------------------------ as a checker

    async def judge(self, claim: Claim) -> Judgement:
        """Judge as the attack has it. A node whose weights are not its version's does not answer."""
        attack = self._attack()
        if not self._is_level or attack in FORMATS:
            raise EngineFailed("a cheat does not judge with weights that are wrong", poisoned=False)
        if attack == "judges_never":
            while self._attack() == attack:  # noqa: ASYNC110 - the attack is a file
                await trio.sleep(LOOK_EVERY_S)
            raise EngineFailed("too late", poisoned=False)
        found = await self._engine.judge(claim)
        if attack == "judges_all_false":
            return msgspec.structs.replace(
                found, scores=tuple(value - 1.0 for value in found.scores), margins=(0.5,) * len(found.margins)
            )
        if attack == "judges_all_true":
            return msgspec.structs.replace(found, margins=(0.0,) * len(found.margins))
        return _bad_answer(attack, found) if attack in _BAD_ANSWERS else found


def _likelihood(one: Completion) -> float:
    return sum(one.logprobs) / len(one.logprobs)


def _drawn_by(attack: str, leased: SamplingParams) -> SamplingParams:
    """The sampling that the engine really gets."""
    match attack:
        case "temperature":
            return msgspec.structs.replace(leased, temperature=COOLER * leased.temperature)
        case "top_p":
            return msgspec.structs.replace(leased, top_p=1.0)
        case "no_end":
            options = msgspec.structs.replace(leased.extra, min_tokens=leased.max_tokens)
            return msgspec.structs.replace(leased, options=options)
        case _:
            return leased


def _bad_answer(attack: str, true: Judgement) -> Any:
    """Numbers that are no judgement, sent as if they were."""
    answer = _BadAnswer(true.version, true.scores, true.previous, true.margins)
    match attack:
        case "judges_nan":
            return answer._replace(scores=(float("nan"),) * len(true.scores))
        case "judges_longer":
            return answer._replace(scores=(*true.scores, -1.0))
        case _:
            epoch, v = true.version
            return answer._replace(version=(epoch, v + 1))


def main() -> None:
    """Run `swarm-node` with a node whose engine client cheats."""
    from node.cli.app import main as run_command_line
    from node.member import engine_runtime
    from node.member.worker import NodeWorker

    class CheatingRuntime(engine_runtime.EngineRuntime):
        """Its worker asks the cheat in the engine's place."""

        def __init__(self, config: Any, *parts: Any) -> None:
            if config.engine == "transformers":
                config = dataclasses.replace(config, engine=QUANTISING)
            super().__init__(config, *parts)
            self._client = CheatingClient(self.host, lambda: read_attack(config.home))
            self.worker = NodeWorker(parts[0], self._client, self._send)

        @property
        def engine_name(self) -> str:
            return "transformers" if super().engine_name == QUANTISING else super().engine_name

        @property
        def engine_version(self) -> VersionId:
            return VersionId(*self._client.version)

    engine_runtime.EngineRuntime = CheatingRuntime
    run_command_line()


if __name__ == "__main__":
    main()
