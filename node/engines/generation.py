"""How an engine process generates: one driver for each style of `node.engines.interface`.

A driver owns the process's main thread. That thread carries out the node's requests one by one, so a commit falls
between two batches (`BatchGeneration`), between two tokens (`SteppedGeneration`), or into a call of the engine's own
that separates two steps (`BackgroundGeneration`).
"""

import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final, NoReturn

from codec.errors import UsageError
from node.engines.base import Completion, DrawnTokens, EngineError
from node.engines.interface import BackgroundEngine, Engine, JudgingEngine, ScoringEngine, SteppedEngine
from node.engines.judgement import Judgement
from node.engines.messages import (
    Completions,
    Done,
    Drawn,
    Failed,
    FromEngine,
    Generate,
    Judge,
    Judged,
    Progress,
    Score,
    Scores,
)

__all__ = [
    "GATHER_S",
    "PROGRESS_EVERY_S",
    "BackgroundGeneration",
    "BatchGeneration",
    "Generation",
    "SteppedGeneration",
    "Tasks",
    "failure",
    "generation_of",
]

PROGRESS_EVERY_S: Final = 0.5
"""Seconds between two `Progress` messages: often enough for leases of seconds to be renewed, and cheap."""
GATHER_S: Final = 1.0
"""Seconds that a claim waits for others while sequences run, so that they are paused at most once a second."""
MOST_TOGETHER: Final = 8
"""Claims judged at once. So many wait at a node (`node.member.scorer.ASKS_HELD`), and the pause stays bounded."""

Tasks = queue.Queue[Callable[[], None]]
"""The node's requests, in the order of their arrival."""
SendToNode = Callable[[FromEngine], None]


def generation_of(engine: Engine, send: SendToNode) -> "Generation":
    """The driver for this engine's style."""
    if isinstance(engine, SteppedEngine):
        return SteppedGeneration(engine, send)
    if isinstance(engine, BackgroundEngine):
        return BackgroundGeneration(engine, send)
    return BatchGeneration(engine, send)


def failure(engine: Engine, number: int, error: Exception) -> Failed:
    """The answer to request `number`, which failed."""
    return Failed(number, str(error) or repr(error), isinstance(error, UsageError), engine.poisoned is not None)


class Generation(ABC):
    """Drives one engine from the main thread. `send` may be called from any thread."""

    preemptible: ClassVar[bool] = False
    """See `messages.Ready`."""
    continuous_batching: ClassVar[bool] = False
    """See `messages.Ready`."""

    @abstractmethod
    def run(self, tasks: Tasks) -> NoReturn:
        """Carry out the tasks as they come, and generate in between."""
        ...

    @abstractmethod
    def generate(self, message: Generate) -> Completions | None:
        """The answer, or None when it comes later."""

    @abstractmethod
    def score(self, message: Score) -> Scores | None:
        """The answer, or None when it comes later. Raises `ValueError` for an engine that cannot score."""

    @abstractmethod
    def judge(self, message: Judge) -> Judged | None:
        """The answer, or None when it comes later. Raises `ValueError` or `EngineError` for an engine that cannot."""

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Drop the flight of request `number`, if it still runs."""

    @abstractmethod
    def answer_commit(self, number: int, pause_s: float) -> Done | None:
        """The answer to a commit that is done, or None when it comes later."""

    @abstractmethod
    def before_reload(self) -> None:
        """Fail the flights that a reload would end."""


def _score_now(engine: Engine, message: Score) -> Scores:
    if not isinstance(engine, ScoringEngine):
        raise ValueError("this engine cannot score tokens")
    found = engine.score(message.prompt, message.token_ids, message.sampling, message.adapter)
    return Scores(message.number, tuple(found), engine.version_of(message.adapter))


def _judge_now(engine: Engine, messages: list[Judge]) -> list[Judged | Failed]:
    """The answers, in the order of the messages. Raises what `JudgingEngine.judge` raises."""
    if not isinstance(engine, JudgingEngine):
        raise ValueError("this engine cannot judge tokens")
    outcomes = engine.judge([message.claim for message in messages])
    return [_judged(engine, message.number, outcome) for message, outcome in zip(messages, outcomes, strict=True)]


def _judged(engine: Engine, number: int, outcome: Judgement | Exception) -> Judged | Failed:
    return failure(engine, number, outcome) if isinstance(outcome, Exception) else Judged(number, outcome)


def _completions(number: int, completions: list[Completion], seconds: float) -> Completions:
    return Completions(number, tuple(completions), seconds)


def _run_tasks(tasks: Tasks) -> NoReturn:
    while True:
        tasks.get()()


class BatchGeneration(Generation):
    """For an engine that generates a batch in one call: everything else waits for its end."""

    def __init__(self, engine: Engine, send: SendToNode) -> None:
        self._engine = engine
        self._send = send

    def run(self, tasks: Tasks) -> NoReturn:
        _run_tasks(tasks)

    def generate(self, message: Generate) -> Completions:
        started = time.perf_counter()
        completions = self._engine.generate(message.prompts, message.sampling, message.adapter)
        return _completions(message.number, completions, time.perf_counter() - started)

    def score(self, message: Score) -> Scores:
        return _score_now(self._engine, message)

    def judge(self, message: Judge) -> None:
        (answer,) = _judge_now(self._engine, [message])
        self._send(answer)

    def cancel(self, number: int) -> None:
        """A batch cannot be stopped; the node drops its answer."""

    def answer_commit(self, number: int, pause_s: float) -> Done:
        return Done(number, pause_s)

    def before_reload(self) -> None:
        """No flight runs: this thread would be generating it."""


class SteppedGeneration(Generation):
    """For an engine that computes one token at a time. Requests are carried out between two steps."""

    preemptible: ClassVar[bool] = True

    def __init__(self, engine: SteppedEngine, send: SendToNode) -> None:
        self._engine = engine
        self._send = send
        self._began_at: dict[int, float] = {}
        """The flights that run, and when they began."""
        self._unanswered_commit: tuple[int, float] | None = None
        """(request number, pause in seconds) of a commit whose answer waits for the next step."""
        self._progress_sent_at = 0.0
        self._streamed: set[int] = set()
        """The flights whose tokens are told as they are drawn."""
        self._claims: list[Judge] = []
        """Claims that wait to be judged together."""
        self._claims_since = 0.0

    def run(self, tasks: Tasks) -> NoReturn:
        while True:
            if not self._began_at and not self._claims:
                tasks.get()()
                continue
            try:
                tasks.get_nowait()()
            except queue.Empty:
                if self._began_at:
                    self._step()  # first, because it answers a commit, and claims may be judged by its version
                self._judge_waiting()

    def _step(self) -> None:
        """Compute one token for every flight, answer the flights that are done, and report progress now and then."""
        started = time.perf_counter()
        try:
            finished = self._engine.step()
        except Exception as error:  # an engine may raise anything; the node decides, as in `Worker._answer`
            traceback.print_exc()
            self._fail_flights(error)
            return
        now = time.perf_counter()
        self._finish_commit(now - started)
        for number, outcome in finished:
            seconds = now - self._began_at.pop(number)
            self._streamed.discard(number)
            if isinstance(outcome, EngineError):
                self._send(failure(self._engine, number, outcome))
            else:
                self._send(_completions(number, outcome, seconds))
        for number in self._streamed:
            if rows := self._engine.new_tokens(number):
                self._send(Drawn(number, tuple(rows)))
        if now - self._progress_sent_at >= PROGRESS_EVERY_S:
            self._progress_sent_at = now
            for number, counts in self._engine.counts().items():
                self._send(Progress(number, tuple(counts)))

    def _fail_flights(self, error: Exception) -> None:
        self._finish_commit(0.0)
        for number in list(self._began_at):
            self._engine.cancel(number)
            del self._began_at[number]
            self._streamed.discard(number)
            self._send(failure(self._engine, number, error))

    def _finish_commit(self, resume_s: float) -> None:
        """Answer a commit once it is known how long the flights waited for their next token."""
        if self._unanswered_commit is not None:
            number, pause_s = self._unanswered_commit
            self._unanswered_commit = None
            self._send(Done(number, pause_s, resume_s))

    def generate(self, message: Generate) -> None:
        self._engine.begin(message.number, message.prompts, message.sampling, message.adapter)
        self._began_at[message.number] = time.perf_counter()
        if message.streamed:
            self._streamed.add(message.number)

    def score(self, message: Score) -> Scores:
        return _score_now(self._engine, message)

    def judge(self, message: Judge) -> None:
        if not self._claims:
            self._claims_since = time.perf_counter()
        self._claims.append(message)

    def _judge_waiting(self) -> None:
        """Judge the claims that wait, unless sequences run and more claims may still come."""
        alone = not self._began_at
        if not self._claims or not (
            alone or len(self._claims) >= MOST_TOGETHER or time.perf_counter() - self._claims_since >= GATHER_S
        ):
            return
        messages, self._claims = self._claims[:MOST_TOGETHER], self._claims[MOST_TOGETHER:]
        try:
            answers = _judge_now(self._engine, messages)
        except Exception as error:  # an engine may raise anything; the node decides, as in `Worker._answer`
            traceback.print_exc()
            answers = [failure(self._engine, message.number, error) for message in messages]
        for answer in answers:
            self._send(answer)

    def cancel(self, number: int) -> None:
        self._engine.cancel(number)
        self._began_at.pop(number, None)
        self._streamed.discard(number)
        if not self._began_at:
            self._finish_commit(0.0)

    def answer_commit(self, number: int, pause_s: float) -> Done | None:
        if not self._began_at:
            return Done(number, pause_s)
        self._unanswered_commit = (number, pause_s)
        return None

    def before_reload(self) -> None:
        self._fail_flights(EngineError("the engine was reloaded"))


class BackgroundGeneration(Generation):
    """For an engine that generates in other processes. A thread reports progress."""

    preemptible: ClassVar[bool] = True
    continuous_batching: ClassVar[bool] = True

    def __init__(self, engine: BackgroundEngine, send: SendToNode) -> None:
        self._engine = engine
        self._send = send
        self._began_at: dict[int, float] = {}

    def run(self, tasks: Tasks) -> NoReturn:
        threading.Thread(target=self._report_progress, name="progress", daemon=True).start()
        _run_tasks(tasks)

    def _report_progress(self) -> None:
        while True:
            time.sleep(PROGRESS_EVERY_S)
            for number, counts in self._engine.counts().items():
                self._send(Progress(number, tuple(counts)))

    def generate(self, message: Generate) -> None:
        self._began_at[message.number] = time.perf_counter()
        draws = self._tell_draws if message.streamed else None
        begun = message.number, message.prompts, message.sampling
        self._engine.begin(*begun, self._finish_flight, message.adapter, draws)

    def _tell_draws(self, number: int, rows: list[tuple[int, DrawnTokens]]) -> None:
        if number in self._began_at:
            self._send(Drawn(number, tuple(rows)))

    def _finish_flight(self, number: int, outcome: list[Completion] | EngineError) -> None:
        began_at = self._began_at.pop(number, None)
        if isinstance(outcome, EngineError):
            self._send(failure(self._engine, number, outcome))
        elif began_at is not None:
            self._send(_completions(number, outcome, time.perf_counter() - began_at))

    def score(self, message: Score) -> None:
        version = self._engine.version_of(message.adapter)

        def done(outcome: tuple[float, ...] | EngineError) -> None:
            if isinstance(outcome, EngineError):
                self._send(failure(self._engine, message.number, outcome))
            else:
                self._send(Scores(message.number, outcome, version))

        self._engine.begin_score(message.prompt, message.token_ids, message.sampling, done, message.adapter)

    def judge(self, message: Judge) -> None:
        number = message.number
        self._engine.begin_judge(message.claim, lambda outcome: self._send(_judged(self._engine, number, outcome)))

    def cancel(self, number: int) -> None:
        self._began_at.pop(number, None)
        self._engine.cancel(number)

    def answer_commit(self, number: int, pause_s: float) -> Done:
        return Done(number, pause_s)

    def before_reload(self) -> None:
        """The engine itself holds its flights back until it serves again."""
