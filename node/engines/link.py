"""One connection of the node to an engine process: requests by number, their answers, and progress."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import trio

from codec.errors import PeerError, SwarmError, UsageError
from node.engines.base import DrawnTokens
from node.engines.messages import Drawn, Failed, FromEngine, FromNode, Generate, Progress, Ready
from node.ipc.async_channel import AsyncChannel
from node.ipc.channel import ChannelClosed, close_fds

__all__ = ["Counts", "Draws", "EngineFailed", "EngineLink", "EngineLost"]

Counts = Callable[[tuple[int, ...]], None]
"""Called with the number of tokens that each prompt of a `Generate` has so far."""

Draws = Callable[[int, DrawnTokens], None]
"""Called with the index of a prompt of a `Generate`, and tokens that were drawn after those of the calls before."""

AnswerT = TypeVar("AnswerT", bound=FromEngine)


class EngineLost(SwarmError):
    """The engine's process ended, or did not answer in time. The node starts it again."""


class EngineFailed(SwarmError):
    """The engine refused a request. `poisoned`: it serves nothing until it was reloaded."""

    def __init__(self, why: str, poisoned: bool) -> None:
        super().__init__(why)
        self.poisoned = poisoned


class _Progress(NamedTuple):
    """Where the progress and the tokens of a running `Generate` go, and the bounds that they must keep."""

    counts: Counts | None
    draws: Draws | None
    max_tokens: int
    told: list[int]
    """The tokens that were told so far, by prompt."""


class EngineLink:
    """One connected process. `receive_answers` runs in one task; requests may be made from any task."""

    def __init__(self, channel: AsyncChannel, kill: Callable[[str], None]) -> None:
        """`kill(why)` ends the process; it is called when an answer is late or invalid."""
        self._channel = channel
        self._kill = kill
        self._number = 0
        self._asked: dict[int, trio.Event] = {}
        """Requests without an answer, by number; the event is set when the answer came or the link closed."""
        self._answers: dict[int, FromEngine] = {}
        self._progress: dict[int, _Progress] = {}

    def next_number(self) -> int:
        """The number of the next request: 1, 2, ..."""
        self._number += 1
        return self._number

    async def receive_answers(self) -> NoReturn:
        """Hand each answer to the task that waits for it.

        Raises `ChannelClosed` when the process is gone, `PeerError` for a message that an engine never sends.
        """
        while True:
            answer, fds = await self._channel.recv()
            close_fds(fds)
            if isinstance(answer, Ready):
                raise PeerError("it said Ready twice")
            if isinstance(answer, Progress):
                self._report(answer)
            elif isinstance(answer, Drawn):
                self._tell(answer)
            elif (event := self._asked.pop(answer.number, None)) is not None:
                self._answers[answer.number] = answer
                event.set()

    def _report(self, progress: Progress) -> None:
        if (watched := self._progress.get(progress.number)) is None:
            return
        if len(progress.counts) != len(watched.told) or max(progress.counts, default=0) > watched.max_tokens:
            raise PeerError("its counts are not those of the sequences it draws")
        if watched.counts is not None:
            watched.counts(progress.counts)

    def _tell(self, drawn: Drawn) -> None:
        if (watched := self._progress.get(drawn.number)) is None or watched.draws is None:
            return
        for index, tokens in drawn.rows:
            if index >= len(watched.told) or tokens.start != watched.told[index] or tokens.end > watched.max_tokens:
                raise PeerError("the tokens that it tells are not those of the sequences it draws")
            watched.told[index] = tokens.end
            watched.draws(index, tokens)

    def watch_progress(self, message: Generate, counts: Counts | None, draws: Draws | None = None) -> None:
        """Report how far `message` is, and its tokens as they are drawn, until `forget_progress`."""
        told = [0] * len(message.prompts)
        self._progress[message.number] = _Progress(counts, draws, message.sampling.max_tokens, told)

    def forget_progress(self, number: int) -> None:
        self._progress.pop(number, None)

    async def send(self, message: FromNode) -> None:
        """Send a message that has no answer. Raises `ChannelClosed`."""
        await self._channel.send(message)

    async def ask(
        self, message: FromNode, answer_type: type[AnswerT], deadline_s: float, fds: Sequence[int] = ()
    ) -> AnswerT:
        """The answer to `message`. `fds` travel with it and stay the caller's.

        Raises `EngineLost` when the process is gone or late (then it is killed), `EngineFailed` when it refuses, and
        `UsageError` when the user can fix the reason.
        """
        event = self._asked[message.number] = trio.Event()
        try:
            with trio.move_on_after(deadline_s) as scope:
                await self._channel.send(message, fds)
                await event.wait()
            if scope.cancelled_caught:
                self._kill(f"{answer_type.__name__} took longer than {deadline_s:g} s")
                raise EngineLost(f"the engine did not answer within {deadline_s:g} s")
        except ChannelClosed as error:
            raise EngineLost("the engine's process ended") from error
        except ValueError as error:  # the message is larger than a frame may be
            raise EngineFailed(str(error), poisoned=False) from error
        finally:
            self._asked.pop(message.number, None)
        answer = self._answers.pop(message.number, None)
        if answer is None:
            raise EngineLost("the engine's process ended")
        if isinstance(answer, Failed):
            if answer.usage:
                raise UsageError(answer.why)
            raise EngineFailed(answer.why, answer.poisoned)
        if not isinstance(answer, answer_type):
            self._kill(f"it answered {type(answer).__name__}")
            raise EngineLost("the engine answered out of turn")
        return answer

    def close(self) -> None:
        """Close the connection; every request without an answer raises `EngineLost`."""
        self._channel.close()
        for event in self._asked.values():
            event.set()
