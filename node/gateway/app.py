"""The gateway's endpoints: each turns an HTTP request into request groups in the ledger, and these into an answer."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import trio
from blake3 import blake3

from codec.errors import PeerError
from node.engines.base import MAX_IMAGES, Version
from node.gateway import bodies
from node.gateway.admission import CHAT, COMPLETIONS, GENERATE, MODEL, Admission, wrong_key
from node.gateway.answers import CompletionAnswer, InvalidSample, event
from node.gateway.clients import Client, Clients, OverQuota
from node.gateway.followed_answer import KEEP_ALIVE_S, FollowedAnswer
from node.gateway.followed_sample import can_follow
from node.gateway.parsed_request import BadRequest, ParsedRequest, parse_chat, parse_completion, parse_tokens
from node.gateway.progress import NOTHING, read_notes
from node.gateway.request_tracker import Impossible, NoNodes, Overloaded, RequestTracker
from node.gateway.text import BadText, Text
from node.gateway.tokenizing import TOKENIZING
from node.gateway.wanted_version import NotServed, name_of, wanted_version
from node.http.memory_budget import BudgetFull, MemoryBudget, MemoryShare
from node.http.messages import CutShort, Request, Response, Send, Streaming, failure, json_response
from node.ledger.state import Group
from swarm.guard import Source, guarded

__all__ = ["App"]

SESSION_HEADERS: Final = ("x-session-id", "x-session-affinity")
"""Headers that may name a request's session, in lower case; the first one counts."""
RETRY_S: Final = "1"
"""The value of `Retry-After`, in seconds."""
READERS: Final = 2
"""Threads that parse requests (JSON, chat templates, tokenizers), and as many that encode answers. A long text must not
stop the swarm's event loop or occupy its threads, and answers must not wait for prompts."""
HELD_BYTES: Final = 64 << 20
"""Memory of the prompts in flight with their scores, and of the samples of answers that are not sent yet: eight million
tokens."""
ENCODED_BYTES: Final = 32 << 20
"""Memory of the answers that are being encoded, or are encoded and being sent."""
ENCODED_WAIT_S: Final = 60.0
"""A choice waits this long for room to be encoded. Slow readers lose their room by `HttpLimits.write_rate`."""
AT_ONCE_BYTES: Final = 1 << 20
"""An answer that takes at most this much memory is sent at once, with its length; a larger one choice by choice."""
REQUEST_BYTES: Final = 4096
"""Memory of a request without its prompts."""
MOST_NAMED: Final = 16
"""Models that the refusal of an unknown one names."""
TOKEN_BYTES: Final = 8
"""Memory of a token of a prompt: four bytes here and four in the ledger."""
MAX_BRACKETS: Final = 1 << 18
"""Opening brackets in a body. Each may become an object of two hundred bytes, and text has far fewer."""


class _Post(NamedTuple):
    """An endpoint that takes a body."""

    fields: str
    """The key in `bodies.BODIES`."""
    parse: Callable[..., ParsedRequest]
    chat: bool = False
    encode: Callable[[CompletionAnswer, int], bytes] = CompletionAnswer.whole
    """Encodes one choice of an answer that is no stream."""


_POSTS: Final = {
    COMPLETIONS: _Post("completions", lambda *body, **how: parse_completion(*body, **how)),
    CHAT: _Post("chat", lambda *body, **how: parse_chat(*body, **how), chat=True),
    GENERATE: _Post("generate", lambda *body, **how: parse_tokens(*body, **how), encode=CompletionAnswer.tokens),
}


class App:
    """Handles the requests of `HttpServer`."""

    def __init__(
        self,
        name: str,
        text: Text,
        tracker: RequestTracker,
        head: Callable[[], tuple[int, int]],
        *,
        adapters: Callable[[], Mapping[str, int]] = dict,
        admission: Admission | None = None,
        answer_within_s: float = 600.0,
        exact_seeds: bool = True,
        images: int = MAX_IMAGES,
    ) -> None:
        """`name`: of the base model. `head()`: the newest (epoch, version). `adapters()`: by name, each one's own
        version; each is a model, too. `admission`: of the clients; None: all may connect. `exact_seeds`: refuse a
        request with a seed where no engine can generate the same tokens again. `images`: that a request may have."""
        self._name = name
        self._text = text
        self._tracker = tracker
        self._head = head
        self._adapters = adapters
        self._admission = Admission(Clients(None)) if admission is None else admission
        self._answer_within_s = answer_within_s
        self._exact_seeds = exact_seeds
        self._images = images
        self._readers = trio.CapacityLimiter(READERS)
        self._writers = trio.CapacityLimiter(READERS)
        self.held = MemoryBudget(HELD_BYTES, 0.0)
        self.encoded = MemoryBudget(ENCODED_BYTES, ENCODED_WAIT_S)

    async def __call__(self, request: Request) -> Response:
        """The answer to a request that `Admission` let in. A bug becomes a 500, because the process is the swarm's seed
        and must go on."""
        with guarded(Source.HTTP):
            return await self._answer_or_failure(request)
        return failure(500, "This is a bug in the gateway; the seed's log has more.")

    async def _answer_or_failure(self, request: Request) -> Response:
        try:
            return await self._route(request)
        except BadRequest as error:
            return failure(400, str(error), param=error.param)
        except BadText as error:
            return failure(400, str(error))
        except InvalidSample as error:
            return failure(502, str(error))
        except PeerError as error:
            return failure(400, f"No node could do this: {error}.")
        except Impossible as error:
            return failure(400, f"No engine can do this: {error}.")
        except OverQuota as error:
            return failure(429, str(error), "rate_limit_exceeded", (("Retry-After", str(error.retry_s)),))
        except NotServed as error:
            retry = (("Retry-After", RETRY_S),) if error.later else (("X-Should-Retry", "false"),)
            headers = (*retry, ("X-Served-Version", name_of(error.served)))
            return failure(409, str(error), "version_not_served", headers, error.param)
        except Overloaded as error:
            return failure(429, f"{error} Try again in a moment.", "overloaded", (("Retry-After", RETRY_S),))
        except NoNodes as error:
            return failure(503, str(error), "no_nodes")
        except BudgetFull:
            why = "Too many answers are held for clients at the moment. Try again in a moment."
            return failure(503, why, "overloaded", (("Retry-After", RETRY_S),))
        except trio.TooSlowError:
            return failure(504, f"No node finished this within {self._answer_within_s:.0f} s.")

    async def _route(self, request: Request) -> Response:
        """The answer to a request whose head was let in."""
        path = request.path.rstrip("/")
        if (post := _POSTS.get(path)) is not None:
            return await self._generate(request, post)
        if (convert := TOKENIZING.get(path)) is not None:
            return await self._convert(request, convert)
        if path == "/health":
            self._tracker.check(0)
            return json_response({"status": "ok"})
        if path == "/v1/models":
            return json_response({"object": "list", "data": [self._model(name) for name in self._names()]})
        name = path.removeprefix(MODEL)
        return self._unknown_model(name) or json_response(self._model(name or self._name))

    def _names(self) -> list[str]:
        """The models: the base, then the adapters. One that has the base's name cannot be asked for."""
        return [self._name, *sorted(self._adapters().keys() - {self._name})]

    def _model(self, name: str) -> dict[str, Any]:
        epoch, version = self._head()
        model: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "swarm",
            "max_model_len": self._text.limits.context,
            "version": [epoch, version],
        }
        if name != self._name:
            model |= {"root": name, "parent": self._name, "own_version": self._adapters().get(name)}
        return model

    def _unknown_model(self, name: str) -> Response | None:
        names = self._names()
        if not name or name in names:
            return None
        there = ", ".join(map(repr, names[:MOST_NAMED])) + (", ..." if len(names) > MOST_NAMED else "")
        return failure(404, f"There is no model {name[:64]!r} here, only {there}.", "model_not_found", param="model")

    def _drawn_by(self, parsed: ParsedRequest) -> ParsedRequest:
        """The request with the adapter that its model is, if it is one. Its session then has a prefix of its own."""
        if parsed.model in ("", self._name):
            return parsed
        affinity = blake3(parsed.affinity + parsed.model.encode()).digest(16) if parsed.affinity else b""
        sampling = parsed.sampling.with_options(adapter=parsed.model)
        return msgspec.structs.replace(parsed, sampling=sampling, affinity=affinity)

    async def _convert(
        self, request: Request, convert: Callable[[bytes | bytearray, Text], dict[str, Any]]
    ) -> Response:
        """The answer of /tokenize or /detokenize. It counts as a request of the client."""
        if (client := self._admission.client(request)) is None:
            return wrong_key()
        client.admit()
        if self._readers.statistics().tasks_waiting >= self._tracker.most:
            raise Overloaded("Too many requests wait to be read.")
        try:
            found = await trio.to_thread.run_sync(
                lambda: convert(_bounded(request.body), self._text), limiter=self._readers
            )
        finally:
            request.release_body()
        return json_response(found)

    async def _generate(self, request: Request, post: _Post) -> Response:
        session = next((found for name in SESSION_HEADERS if (found := request.headers.get(name))), "")
        if (client := self._admission.client(request)) is None:  # its key was removed a moment ago
            return wrong_key()
        again = request.before is not None  # a seed that ended has let it in
        if again:
            await self._tracker.wait_for_nodes()
        else:
            self._tracker.check(0)  # refuse before the tokenizer works
            client.admit()
        if self.held.held >= self.held.most:
            raise BudgetFull
        parsed = await self._parse(request, post, session, again=again)
        if isinstance(parsed, Response):
            return parsed
        prompts = REQUEST_BYTES + TOKEN_BYTES * sum(map(len, parsed.prompts)) + parsed.scores_bytes
        prompts += sum(map(len, parsed.images))
        if self.held.held and self.held.held + prompts > self.held.most:  # a single request may exceed the budget
            raise BudgetFull
        held = MemoryShare(self.held)
        request.until_sent.callback(held.resize, 0)
        held.resize(prompts)
        samples = parsed.n * len(parsed.prompts)
        self._tracker.check(samples, again=again)
        request.until_sent.enter_context(client.flight(samples, sum(map(len, parsed.prompts)), again=again))
        try:
            if not again:  # the nodes that can may not be back yet
                await self._tracker.check_abilities(parsed.sampling)
        except Impossible as error:
            param = parsed.field_for(error.lacking)
            raise BadRequest(f"{param}: {error}", param) from error
        if parsed.stream:
            follow = not parsed.prompt_only and all(
                can_follow(parsed.sampling, parsed.n, len(prompt)) for prompt in parsed.prompts
            )
            stream = (self._follow if follow else self._stream)(parsed, post.chat, held, client, request)
            return Response(200, stream, "text/event-stream; charset=utf-8", (("Cache-Control", "no-store"),))
        answer = await self._answer(parsed, post.chat, held, client)
        costs = answer.costs()
        if sum(costs) > AT_ONCE_BYTES:

            async def stream_choices(send: Send) -> None:
                try:
                    await self._send_choices(answer, post.encode, send)
                except (InvalidSample, BudgetFull) as error:
                    raise CutShort from error

            return Response(200, stream_choices)
        await self.encoded.reserve(sum(costs))
        encoded = MemoryShare(self.encoded)
        encoded.count = sum(costs)
        request.until_sent.callback(encoded.resize, 0)
        body = await trio.to_thread.run_sync(
            lambda: b"".join(post.encode(answer, i) for i in range(len(costs))), limiter=self._writers
        )
        encoded.resize(2 * len(body))
        return Response(200, body)

    async def _send_choices(
        self, answer: CompletionAnswer, encode: Callable[[CompletionAnswer, int], bytes], send: Send
    ) -> None:
        """Encode and send one choice after the other, so that no more is encoded than the client reads."""
        for i, cost in enumerate(answer.costs()):
            async with self.encoded.share(cost) as encoded:
                part = await trio.to_thread.run_sync(encode, answer, i, limiter=self._writers)
                encoded.resize(2 * len(part))  # and its copy with the length of the chunk before it
                await send(part)

    async def _parse(self, request: Request, post: _Post, session: str, *, again: bool) -> ParsedRequest | Response:
        """Parse a request in one of the readers' threads. A client that disconnects while it waits leaves the queue."""
        if not again and self._readers.statistics().tasks_waiting >= self._tracker.most:
            raise Overloaded("Too many requests wait to be read.")

        def parse() -> ParsedRequest | Response:
            body = bodies.parse(post.fields, _bounded(request.body))
            if (unknown := self._unknown_model(body.model or "")) is not None:
                return unknown
            wanted = wanted_version(body, request.headers)
            if wanted is not None:
                wanted.check(self._head())
            more = {"most_images": self._images} if post.chat else {}
            parsed = self._drawn_by(post.parse(body, self._text, session, exact=self._exact_seeds, **more))
            parsed = msgspec.structs.replace(parsed, wanted=wanted, again=again)
            # An array has four bytes per token, a tuple of numbers thirty-six.
            return msgspec.structs.replace(parsed, prompts=tuple(array("I", prompt) for prompt in parsed.prompts))

        try:
            return await trio.to_thread.run_sync(parse, limiter=self._readers)
        finally:
            request.release_body()

    async def _answer(self, parsed: ParsedRequest, chat: bool, held: MemoryShare, client: Client) -> CompletionAnswer:
        """The samples of all prompts. `held` grows by their memory, and `client` has used their tokens."""
        groups: dict[int, Group] = {}
        errors: list[Exception] = []

        async def ask(i: int, scope: trio.CancelScope) -> None:
            try:
                groups[i] = await self._tracker.ask(
                    parsed.prompts[i], parsed.n, parsed.sampling, parsed.affinity, parsed.wanted,
                    images=parsed.images, again=parsed.again,
                )  # fmt: skip
            except (Impossible, NoNodes, Overloaded, PeerError) as error:
                errors.append(error)
                scope.cancel()

        with trio.fail_after(self._answer_within_s):
            async with trio.open_nursery() as nursery:
                for i in range(len(parsed.prompts)):
                    nursery.start_soon(ask, i, nursery.cancel_scope)
        if errors:
            raise errors[0]
        ordered = [groups[i] for i in range(len(parsed.prompts))]
        if parsed.wanted is not None:
            parsed.wanted.check_tokens(_versions_of(ordered), self._head())
        kinds = self._tracker.kinds(ordered)

        answer = CompletionAnswer(parsed.model or self._name, parsed, ordered, self._text, chat=chat, kinds=kinds)
        held.resize(held.count + answer.held_bytes)
        client.use(sum(done.rollout.length for group in ordered for done in group.done.values()))
        return answer

    def _follow(
        self, parsed: ParsedRequest, chat: bool, held: MemoryShare, client: Client, request: Request
    ) -> Streaming:
        """The answer as events, which are sent as the tokens are drawn. Raises `PeerError` for notes that are none."""
        past = read_notes(request.before or (), parsed.sampling.extra.top_logprobs)
        return FollowedAnswer(
            parsed, self._text, self._tracker, self._writers, held, self.encoded,
            name=parsed.model or self._name, chat=chat, within_s=self._answer_within_s, head=self._head,
            use=client.use, note=request.note, past=past,
        ).send_events  # fmt: skip

    def _stream(
        self, parsed: ParsedRequest, chat: bool, held: MemoryShare, client: Client, request: Request
    ) -> Streaming:
        """The answer as events, which are sent when all samples were accepted. Errors are sent as an event, too."""

        async def stream(send: Send) -> None:
            finished = trio.Event()
            answer: CompletionAnswer | None = None
            why = ""

            async def wait_for_answer() -> None:
                nonlocal answer, why
                try:
                    answer = await self._answer(parsed, chat, held, client)
                except (Impossible, NoNodes, NotServed, Overloaded, PeerError, trio.TooSlowError) as error:
                    why = str(error) or "No node finished this in time."
                finished.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_answer)
                while not finished.is_set():
                    with trio.move_on_after(KEEP_ALIVE_S):
                        await finished.wait()
                    if not finished.is_set():
                        request.note(NOTHING)
                        await send(b": waiting\n\n")
            if answer is not None:
                try:
                    await self._send_choices(answer, CompletionAnswer.events, send)
                except InvalidSample as error:
                    why = str(error)
                except BudgetFull:
                    why = "Too many answers are held for clients at the moment."
            if why:
                await send(event({"error": {"message": why, "type": "server_error", "code": 503}}))

        return stream


def _versions_of(groups: Iterable[Group]) -> Iterator[Version]:
    for group in groups:
        for done in group.done.values():
            yield from ((span.epoch, span.version) for span in done.rollout.spans)


def _bounded(body: bytes | bytearray) -> bytes | bytearray:
    """`body`, unless it would become too many objects. Raises `BadRequest`."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise BadRequest(f"The body has more than {MAX_BRACKETS} lists and objects.")
    return body
