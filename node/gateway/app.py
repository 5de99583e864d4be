"""The endpoints: an HTTP request in, work in the ledger, an answer out."""

import hmac
from array import array
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import trio

from codec.errors import PeerError
from node.gateway import parameters
from node.gateway.answers import Answer, Broken, event
from node.gateway.bodies import Bodies, Full, Held
from node.gateway.http import CutShort, Head, Request, Response, Say, Streaming, failure, json_response
from node.gateway.parsed_request import BadRequest, ParsedRequest, want_chat, want_completion, want_tokens
from node.gateway.request_tracker import Impossible, NoNodes, Overloaded, RequestTracker
from node.gateway.text import BadText, Text
from node.ledger.state import Group
from swarm.guard import Source, guarded

__all__ = ["App"]

KEEP_ALIVE_S: Final = 10.0
"""While a stream waits for its tokens it says something this often, or a proxy would think it dead."""
SESSION_HEADERS: Final = ("x-session-id", "x-session-affinity")
RETRY_S: Final = "1"
READERS: Final = 2
"""Threads that read requests (JSON, chat templates, tokenizers), and as many that word answers: a long text must
neither stop the swarm's loop nor fill its threads, and answers must not wait behind prompts."""
HELD_BYTES: Final = 64 << 20
"""What prompts in flight, and samples of answers that are not yet sent, may take in all: eight million tokens."""
WORDED_BYTES: Final = 32 << 20
"""What is being worded, or is worded and being sent, may take in all."""
WORDED_WAIT_S: Final = 60.0
"""A choice waits this long for room to be worded. Slow readers lose theirs by the minimum rate of `http.Limits`."""
AT_ONCE_BYTES: Final = 1 << 20
"""An answer that takes no more than this is sent at once, with its length; a larger one choice by choice."""
REQUEST_BYTES: Final = 4096
TOKEN_BYTES: Final = 8
"""Of a prompt: four bytes here and four in the ledger."""
MAX_BRACKETS: Final = 1 << 18
"""Opening brackets in a body. Each may become an object of two hundred bytes, and text has far fewer."""


class _Post(NamedTuple):
    """An endpoint that takes a body. `fields`: of `parameters.BODIES`. `understand`: what is asked for. `word`: how
    each choice of a whole answer is worded."""

    fields: str
    understand: Callable[..., ParsedRequest]
    chat: bool = False
    word: Callable[[Answer, int], bytes] = Answer.whole


_POSTS: Final = {
    "/v1/completions": _Post("completions", lambda *asked, **how: want_completion(*asked, **how)),
    "/v1/chat/completions": _Post("chat", lambda *asked, **how: want_chat(*asked, **how), chat=True),
    "/inference/v1/generate": _Post("generate", lambda *asked, **how: want_tokens(*asked, **how), word=Answer.tokens),
}
_GETS: Final = ("/v1/models", "/health")
_MODEL: Final = "/v1/models/"


class App:
    """`name`: what the model is called. `head()`: (epoch, version). `key`: what clients must say, if anything.
    `exact_seeds`: a request with a seed is refused where no engine can draw the same tokens again."""

    def __init__(
        self,
        name: str,
        text: Text,
        tracker: RequestTracker,
        head: Callable[[], tuple[int, int]],
        *,
        key: str = "",
        answer_within_s: float = 600.0,
        exact_seeds: bool = True,
    ) -> None:
        self._name = name
        self._text = text
        self._tracker = tracker
        self._head = head
        self._key = key
        self._answer_within_s = answer_within_s
        self._exact_seeds = exact_seeds
        self._readers = trio.CapacityLimiter(READERS)
        self._writers = trio.CapacityLimiter(READERS)
        self.held = Bodies(HELD_BYTES, 0.0)
        self.worded = Bodies(WORDED_BYTES, WORDED_WAIT_S)

    async def __call__(self, request: Request) -> Response:
        """Where whatever goes wrong with one request ends: the process behind this is the swarm's seed."""
        with guarded(Source.HTTP):
            return await self._told(request)
        return failure(500, "This is a bug in the gateway; the seed's log has more.")

    def check(self, head: Head) -> Response | None:
        """Judges a request before its body is read: None when it may go on."""
        if "origin" in head.headers:
            return failure(403, "Web pages may not speak to this gateway.")
        if not self._may(head.headers.get("authorization", "")):
            return failure(401, "Wrong or missing API key.", "invalid_api_key")
        path = head.path.rstrip("/")
        if head.method == "POST" and path in _POSTS:
            kind = head.headers.get("content-type", "").partition(";")[0].strip().lower()
            return None if kind == "application/json" else failure(400, "Content-Type: application/json, please.")
        if head.method == "GET" and (path in _GETS or path.startswith(_MODEL)):
            return failure(400, "A GET has no body here.") if head.length else None
        if path in _POSTS or path in _GETS:
            return failure(405, f"{head.method[:16]} is not for {path}.")
        shown = path[:64] or "/"
        return failure(404, f"There is no {shown} here; /v1/models, /v1/completions, /v1/chat/completions.")

    async def _told(self, request: Request) -> Response:
        """An answer, also to what cannot be done."""
        try:
            return await self._route(request)
        except BadRequest as error:
            return failure(400, str(error), param=error.param)
        except BadText as error:
            return failure(400, str(error))
        except Broken as error:
            return failure(502, str(error))
        except PeerError as error:
            return failure(400, f"No node could do this: {error}.")
        except Impossible as error:
            return failure(400, f"No engine can do this: {error}.")
        except Overloaded as error:
            return failure(429, f"{error} Try again in a moment.", "overloaded", (("Retry-After", RETRY_S),))
        except NoNodes as error:
            return failure(503, str(error), "no_nodes")
        except Full:
            why = "Too many answers are held for clients at the moment. Try again in a moment."
            return failure(503, why, "overloaded", (("Retry-After", RETRY_S),))
        except trio.TooSlowError:
            return failure(504, f"No node finished this within {self._answer_within_s:.0f} s.")

    async def _route(self, request: Request) -> Response:
        """Of a request whose head `check` let pass."""
        path = request.path.rstrip("/")
        if (post := _POSTS.get(path)) is not None:
            return await self._serve(request, post)
        if path == "/health":
            self._tracker.check(0)
            return json_response({"status": "ok"})
        if path == "/v1/models":
            return json_response({"object": "list", "data": [self._model()]})
        return self._unknown_model(path.removeprefix(_MODEL)) or json_response(self._model())

    def _may(self, said: str) -> bool:
        return not self._key or hmac.compare_digest(said.encode(), f"Bearer {self._key}".encode())

    def _model(self) -> dict[str, Any]:
        epoch, version = self._head()
        return {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "swarm",
            "max_model_len": self._text.limits.context,
            "version": [epoch, version],
        }

    def _unknown_model(self, name: str) -> Response | None:
        if name in ("", self._name):
            return None
        return failure(
            404, f"There is no model {name[:64]!r} here, only {self._name!r}.", "model_not_found", param="model"
        )

    async def _serve(self, request: Request, post: _Post) -> Response:
        session = next((found for name in SESSION_HEADERS if (found := request.headers.get(name))), "")
        self._tracker.check(0)  # before a tokenizer works for nothing
        if self.held.held >= self.held.most:
            raise Full
        wanted = await self._read(request, post, session)
        if isinstance(wanted, Response):
            return wanted
        prompts = REQUEST_BYTES + TOKEN_BYTES * sum(map(len, wanted.prompts))
        if self.held.held and self.held.held + prompts > self.held.most:  # one alone may be larger
            raise Full
        held = Held(self.held)
        request.until_sent.callback(held.resize, 0)
        held.resize(prompts)
        self._tracker.check(wanted.n * len(wanted.prompts))
        try:
            await self._tracker.check_abilities(wanted.sampling)
        except Impossible as error:
            param = wanted.blame(error.lacking)
            raise BadRequest(f"{param}: {error}", param) from error
        if wanted.stream:
            stream = self._stream(wanted, post.chat, held)
            return Response(200, stream, "text/event-stream; charset=utf-8", (("Cache-Control", "no-store"),))
        answer = await self._answer(wanted, post.chat, held)
        costs = answer.costs()
        if sum(costs) > AT_ONCE_BYTES:

            async def send(say: Say) -> None:
                try:
                    await self._say(answer, post.word, say)
                except (Broken, Full) as error:
                    raise CutShort from error

            return Response(200, send)
        await self.worded.reserve(sum(costs))
        worded = Held(self.worded)
        worded.count = sum(costs)
        request.until_sent.callback(worded.resize, 0)
        parts = await trio.to_thread.run_sync(
            lambda: b"".join(post.word(answer, i) for i in range(len(costs))), limiter=self._writers
        )
        worded.resize(2 * len(parts))
        return Response(200, parts)

    async def _say(self, answer: Answer, word: Callable[[Answer, int], bytes], say: Say) -> None:
        """Word and send one choice after the other: no more of an answer is held than its client takes."""
        for i, cost in enumerate(answer.costs()):
            async with self.worded.room(cost) as worded:
                part = await trio.to_thread.run_sync(word, answer, i, limiter=self._writers)
                worded.resize(2 * len(part))  # and its copy with the length of the chunk before it
                await say(part)

    async def _read(self, request: Request, post: _Post, session: str) -> ParsedRequest | Response:
        """What is asked for. Waits for its turn; whoever hangs up meanwhile is out of the queue."""
        if self._readers.statistics().tasks_waiting >= self._tracker.most:
            raise Overloaded("Too many requests wait to be read.")

        def read() -> ParsedRequest | Response:
            body = _decode(request.body, post.fields)
            if (unknown := self._unknown_model(body.model or "")) is not None:
                return unknown
            wanted = post.understand(body, self._text, session, exact=self._exact_seeds)
            # An array has four bytes a token, a tuple of numbers thirty-six.
            return msgspec.structs.replace(wanted, prompts=tuple(array("I", prompt) for prompt in wanted.prompts))

        try:
            return await trio.to_thread.run_sync(read, limiter=self._readers)
        finally:
            request.let_go()

    async def _answer(self, wanted: ParsedRequest, chat: bool, held: Held) -> Answer:
        """`held`: grows by what the samples take."""
        groups: dict[int, Group] = {}
        errors: list[Exception] = []

        async def ask(i: int, scope: trio.CancelScope) -> None:
            try:
                groups[i] = await self._tracker.ask(wanted.prompts[i], wanted.n, wanted.sampling, wanted.affinity)
            except (Impossible, NoNodes, Overloaded, PeerError) as error:
                errors.append(error)
                scope.cancel()

        with trio.fail_after(self._answer_within_s):
            async with trio.open_nursery() as nursery:
                for i in range(len(wanted.prompts)):
                    nursery.start_soon(ask, i, nursery.cancel_scope)
        if errors:
            raise errors[0]
        ordered = [groups[i] for i in range(len(wanted.prompts))]
        kinds = self._tracker.kinds(ordered)

        answer = Answer(self._name, wanted, ordered, self._text, chat=chat, kinds=kinds)
        held.resize(held.count + answer.held_bytes)
        return answer

    def _stream(self, wanted: ParsedRequest, chat: bool, held: Held) -> Streaming:
        """Its head is out already, so what goes wrong now is told as an event."""

        async def stream(say: Say) -> None:
            over = trio.Event()
            answer: Answer | None = None
            why = ""

            async def work() -> None:
                nonlocal answer, why
                try:
                    answer = await self._answer(wanted, chat, held)
                except (Impossible, NoNodes, Overloaded, PeerError, trio.TooSlowError) as error:
                    why = str(error) or "No node finished this in time."
                over.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
                while not over.is_set():
                    with trio.move_on_after(KEEP_ALIVE_S):
                        await over.wait()
                    if not over.is_set():
                        await say(b": waiting\n\n")
            if answer is not None:
                try:
                    await self._say(answer, Answer.events, say)
                except Broken as error:
                    why = str(error)
                except Full:
                    why = "Too many answers are held for clients at the moment."
            if why:
                await say(event({"error": {"message": why, "type": "server_error", "code": 503}}))

        return stream


def _decode(body: bytes | bytearray, fields: str) -> Any:
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise BadRequest(f"The body has more than {MAX_BRACKETS} lists and objects.")
    return parameters.parse(fields, body)
