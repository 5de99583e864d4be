"""One sample whose tokens a client gets while they are drawn. Pure.

A token that is taken is never taken back: the client has it. When the node that drew it is lost, or its rollout does
not count, another node continues. It gets the tokens so far as the end of its prompt (`rest`), so that it cannot
contradict them. Where what is drawn depends on more than the text before it (a seed, penalties, banned sequences of
several tokens), the sample is drawn again from its beginning instead. The tokens that come then are those that the
client has, unless the model changed meanwhile; only at the first one that differs it is continued as above.

The token that ends a sample is not taken before the sample was accepted.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import trio

from node.engines.base import DrawnTokens, SamplingParams, Version
from node.engines.structures import begun_by
from node.engines.texts import StopText
from node.engines.top_logprobs import PAIR
from node.ledger.messages import MAX_TOKENS, Rollout
from node.ledger.packing import unpack_floats, unpack_tokens

__all__ = ["Ending", "FollowedSample", "Piece", "can_follow", "rest_of"]


class Ending(NamedTuple):
    """The end of an accepted sample: it has `length` tokens. `stop`: the place of the stop text in its text, in
    characters; None: it ended otherwise. `node`: whose rollout was accepted."""

    reason: str
    length: int
    stop: tuple[int, int] | None
    node: bytes


class Piece(NamedTuple):
    """What is new of a sample, after `begin` tokens. `versions`: those of all its tokens so far, see
    `FollowedSample.versions`. `ending`: None: more tokens come. `top`: as `Completion.top`, of these tokens."""

    begin: int
    tokens: list[int]
    logprobs: list[float]
    versions: tuple[tuple[Version, int], ...]
    ending: Ending | None
    top: bytes = b""


class FollowedSample:
    """The sample of one request group of one sample, and of those that continue it. A `Follower` of each."""

    def __init__(
        self,
        sampling: SamplingParams,
        stop: Callable[[], StopText] | None = None,
        grown: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """`stop()`: a new finder of the stop texts in the text of the sample; None: it has none. `grown(tokens)`: so
        many tokens came."""
        self._grown = grown
        self._sampling = sampling
        self._new_stop = stop
        self._stop = None if stop is None else stop()
        self._base = 0
        """Tokens in the prompt of the present group."""
        self._anew = False
        """The next group draws the sample from its beginning, although tokens were taken."""
        self._heard = 0
        """Tokens of the present group that its present lease told, without a gap."""
        self._lease: int | None = None
        self._wake: Callable[[], None] = lambda: None
        self.lost = False
        """The present group cannot continue what was taken: the sample needs the next one."""
        self.contradicted = False
        """The last rollout has other tokens than its own lease told: its node lies about one of them."""
        self._full = False
        """The next token ends the sample, and waits for it to be accepted."""
        self.tokens = array("I")
        self.logprobs = array("f")
        self.top = bytearray()
        """As `Completion.top`."""
        self._width = PAIR.itemsize * sampling.extra.top_logprobs
        """Bytes of `top` for a token."""
        self.versions: list[tuple[Version, int]] = []
        """(version, number of the first token that it did not draw), in order."""
        self.ending: Ending | None = None
        """Set when the sample was accepted, and has all its tokens."""
        self.news = trio.Event()
        """Set, and replaced, when there are more tokens, or the end."""

    def begin_group(self, wake: Callable[[], None]) -> tuple[Sequence[int], SamplingParams]:
        """(what follows the prompt, the sampling) of the next group. `wake()` is called when it is `lost`."""
        self._base, self._anew = 0 if self._anew else len(self.tokens), False
        self._heard, self._lease, self._wake = 0, None, wake
        self.lost = False
        self._rewind()
        return self.tokens[: self._base], rest_of(self._sampling, self._base)

    def restore(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top: bytes,
        versions: Sequence[tuple[Version, int]],
        ending: Ending | None,
    ) -> Piece:
        """Take what the client has from a seed that ended, before the first group; see `Piece`. Returns it as `since`
        does."""
        begin = len(self.tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.top += top
        self.versions, self.ending = list(versions), ending
        self._anew = _draws_alike(self._sampling)
        return self.since(begin)

    def since(self, begin: int) -> Piece:
        """What came after the first `begin` tokens."""
        tokens, logprobs = self.tokens[begin:].tolist(), self.logprobs[begin:].tolist()
        return Piece(begin, tokens, logprobs, tuple(self.versions), self.ending, bytes(self.top[begin * self._width :]))

    # ------------------------------------------------------------ as a follower

    def hear(self, sample: int, lease: int, drawn: DrawnTokens) -> None:
        """See `Follower`."""
        if sample or self.lost or self.ending is not None:
            return
        if (self._lease is not None and lease != self._lease) or drawn.start < self._heard:
            self._begin_again()
        self._lease = lease
        if self.lost or drawn.start != self._heard:  # tokens before these were lost: all come when it is accepted
            return
        before = len(self.tokens)
        for i, (token, logprob) in enumerate(zip(drawn.token_ids, drawn.logprobs, strict=True)):
            if not self._take(token, logprob, drawn.top[i * self._width : (i + 1) * self._width], drawn.version):
                break
        if len(self.tokens) > before:
            self._grown(len(self.tokens) - before)
            self._tell()

    def lapse(self, sample: int) -> bool:
        """See `Follower`."""
        if not sample and not self.lost and self.ending is None:
            self._begin_again()
        return self.lost

    def _begin_again(self) -> None:
        self._heard, self._lease = 0, None
        if len(self.tokens) > self._base and not _draws_alike(self._sampling):
            self._lose()
        else:
            self._rewind()

    def _lose(self) -> None:
        self.lost = True
        self._wake()

    def _take(self, token: int, logprob: float, top: bytes, version: Version) -> bool:
        """Whether the token was taken, or has been before."""
        at = self._base + self._heard
        if at < len(self.tokens):
            if self.tokens[at] != token:
                self._lose()
                return False
            self._heard += 1
            return True
        if (
            self._full
            or at + 1 >= self._sampling.max_tokens
            or token in self._sampling.stop_tokens
            or (self._stop is not None and self._stop.add(token))
        ):
            self._full = True
        if self._full:
            return False
        self._append(token, logprob, top, version)
        self._heard += 1
        return True

    def _append(self, token: int, logprob: float, top: bytes, version: Version) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.top += top
        if self.versions and self.versions[-1][0] == version:
            self.versions.pop()
        self.versions.append((version, len(self.tokens)))

    def _tell(self) -> None:
        self.news.set()
        self.news = trio.Event()

    # ------------------------------------------------------------ its end

    def finish(self, rollout: Rollout, node: bytes) -> bool:
        """The accepted rollout of the present group. False: it contradicts what was taken, so it needs the next
        group."""
        tokens, logprobs = unpack_tokens(rollout.token_ids), unpack_floats(rollout.logprobs)
        before = len(self.tokens)
        taken = before - self._base
        if tuple(self.tokens[self._base :]) != tokens[:taken]:
            told = tuple(self.tokens[self._base : self._base + self._heard])
            self.contradicted = rollout.lease == self._lease and told != tokens[: self._heard]
            self.lost = True
            return False
        versions = [((span.epoch, span.version), self._base + span.end) for span in rollout.spans]
        self.versions = [entry for entry in self._before(self._base) if entry[1]] + versions
        self.tokens.extend(tokens[taken:])
        self.logprobs.extend(logprobs[taken:])
        self.top += rollout.top[taken * self._width :]
        count, reason, span = len(self.tokens), str(rollout.finish_reason), None
        text_ends = count - (reason == "stop" and self.tokens[-1] in self._sampling.stop_tokens)
        if self._new_stop is not None:
            stop = self._new_stop()
            for number, token in enumerate(self.tokens[:text_ends], 1):
                if stop.add(token):
                    count, reason, span = number, "stop", stop.span
                    break
        del self.tokens[count:], self.logprobs[count:], self.top[count * self._width :]
        self.versions = self._before(count)
        self.ending = Ending(reason, count, span, node)
        self._grown(count - before)
        self._tell()
        return True

    def _before(self, count: int) -> list[tuple[Version, int]]:
        """The versions of the first `count` tokens."""
        found: list[tuple[Version, int]] = []
        for version, end in self.versions:
            if not found or found[-1][1] < count:
                found.append((version, min(end, count)))
        return found if count else []

    def _rewind(self) -> None:
        """The next token is the one after those that were taken."""
        self._full = False
        if self._new_stop is not None:
            self._stop = self._new_stop()
            for token in self.tokens:
                self._stop.add(token)


def can_follow(sampling: SamplingParams, n: int, prompt: int) -> bool:
    """Whether clients may get the tokens of such samples while they are drawn. `prompt`: its tokens.

    Otherwise they get each answer when its samples were accepted: routes and scores of the prompt come with whole
    samples, several samples with one seed belong to one group, and a prompt must have room for the tokens that are
    continued.
    """
    options = sampling.extra
    if options.routes or options.prompt_logprobs is not None:
        return False
    return (n == 1 or not options.seeded) and prompt + sampling.max_tokens <= MAX_TOKENS


def rest_of(sampling: SamplingParams, taken: int) -> SamplingParams:
    """The sampling of what follows `taken` tokens of a sample, which are in the prompt. It has other random numbers."""
    if not taken:
        return sampling
    options = sampling.extra
    structure = begun_by(options.structure, taken) if options.structure else ""
    rest = sampling.with_options(min_tokens=max(0, options.min_tokens - taken), structure=structure)
    seed = (sampling.seed + taken) % (1 << 63)
    return msgspec.structs.replace(rest, max_tokens=sampling.max_tokens - taken, seed=seed)


def _draws_alike(sampling: SamplingParams) -> bool:
    """Whether a sample that is lost is drawn again from its beginning: what comes next depends on the places of the
    tokens so far, or on which of them were drawn."""
    options = sampling.extra
    several = any(len(words) > 1 for words in options.banned)
    return options.seeded or bool(options.presence_penalty or options.frequency_penalty) or several
