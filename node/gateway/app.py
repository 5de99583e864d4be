"""The endpoints: an HTTP request in, work in the ledger, an answer out."""

import hmac
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import trio

from codec.errors import PeerError
from node.gateway.answers import Answer, event
from node.gateway.counter import Counter, Impossible, NoNodes, Overloaded
from node.gateway.http import Request, Response, Say, Streaming, failure, json_response
from node.gateway.text import BadText, Text
from node.gateway.wanted import (
    BadRequest,
    Chat,
    Completion,
    Generate,
    Wanted,
    want_chat,
    want_completion,
    want_tokens,
)
from node.ledger.state import Group

__all__ = ["App"]

KEEP_ALIVE_S: Final = 10.0
"""While a stream waits for its tokens it says something this often, or a proxy would think it dead."""
SESSION_HEADERS: Final = ("x-session-id", "x-session-affinity")
RETRY_S: Final = "1"

_log = logging.getLogger(__name__)


class App:
    """`name`: what the model is called. `head()`: (epoch, version). `key`: what clients must say, if anything."""

    def __init__(
        self,
        name: str,
        text: Text,
        counter: Counter,
        head: Callable[[], tuple[int, int]],
        *,
        key: str = "",
        answer_within_s: float = 600.0,
    ) -> None:
        self._name = name
        self._text = text
        self._counter = counter
        self._head = head
        self._key = key
        self._answer_within_s = answer_within_s
        self._threads = trio.CapacityLimiter(2)
        """For tokenizers: a long text must not stop the swarm's loop, and many of them not fill the threads."""

    async def __call__(self, request: Request) -> Response:
        """Where whatever goes wrong with one request ends: the process behind this is the swarm's seed."""
        try:
            return await self._route(request)
        except (BadRequest, BadText) as error:
            return failure(400, str(error))
        except PeerError as error:
            return failure(400, f"No node could do this: {error}.")
        except Impossible as error:
            return failure(400, f"No engine can do this: {error}.")
        except Overloaded as error:
            return failure(429, f"{error} Try again in a moment.", "overloaded", (("Retry-After", RETRY_S),))
        except NoNodes as error:
            return failure(503, str(error), "no_nodes")
        except trio.TooSlowError:
            return failure(504, f"No node finished this within {self._answer_within_s:.0f} s.")
        except Exception:  # our bug: this request's, and nobody else's
            _log.exception("a request failed")
            return failure(500, "This is a bug in the gateway; the seed's log has more.")

    async def _route(self, request: Request) -> Response:
        if "origin" in request.headers:
            return failure(403, "Web pages may not speak to this gateway.")
        if not self._may(request.headers.get("authorization", "")):
            return failure(401, "Wrong or missing API key.", "invalid_api_key")
        path = request.path.rstrip("/")
        match request.method, path:
            case "GET", "/v1/models":
                return json_response({"object": "list", "data": [self._model()]})
            case "GET", _ if path.startswith("/v1/models/"):
                return self._unknown_model(path.removeprefix("/v1/models/")) or json_response(self._model())
            case "GET", "/health":
                self._counter.check(0)
                return json_response({"status": "ok"})
            case "POST", "/v1/completions":
                body = _decode(request, Completion)
                return self._unknown_model(body.model) or await self._serve(request, body, want_completion, False)
            case "POST", "/v1/chat/completions":
                body = _decode(request, Chat)
                return self._unknown_model(body.model) or await self._serve(request, body, want_chat, True)
            case "POST", "/inference/v1/generate":
                body = _decode(request, Generate)
                unknown = self._unknown_model(body.model)
                return unknown or await self._serve(request, body, want_tokens, False, Answer.tokens)
            case _, "/v1/models" | "/v1/completions" | "/v1/chat/completions" | "/inference/v1/generate" | "/health":
                return failure(405, f"{request.method} is not for {path}.")
        return failure(404, f"There is no {path or '/'} here; /v1/models, /v1/completions, /v1/chat/completions.")

    def _may(self, said: str) -> bool:
        return not self._key or hmac.compare_digest(said.encode(), f"Bearer {self._key}".encode())

    def _model(self) -> dict[str, Any]:
        epoch, version = self._head()
        return {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "swarm",
            "max_model_len": self._text.context,
            "version": [epoch, version],
        }

    def _unknown_model(self, name: str) -> Response | None:
        if name in ("", self._name):
            return None
        return failure(404, f"There is no model {name[:64]!r} here, only {self._name!r}.", "model_not_found")

    async def _serve(
        self,
        request: Request,
        body: Any,
        understand: Callable[[Any, Text, str], Wanted],
        chat: bool,
        word: Callable[[Answer], dict[str, Any]] = Answer.whole,
    ) -> Response:
        """`understand`: what is asked for. `word`: how a whole answer is worded."""
        session = next((found for name in SESSION_HEADERS if (found := request.headers.get(name))), "")
        self._counter.check(0)  # before a tokenizer works for nothing
        wanted = await trio.to_thread.run_sync(understand, body, self._text, session, limiter=self._threads)
        self._counter.check(wanted.n * len(wanted.prompts))
        if wanted.stream:
            return Response(
                200, self._stream(wanted, chat), "text/event-stream; charset=utf-8", (("Cache-Control", "no-store"),)
            )
        answer = await self._answer(wanted, chat)
        return json_response(await trio.to_thread.run_sync(word, answer, limiter=self._threads))

    async def _answer(self, wanted: Wanted, chat: bool) -> Answer:
        groups: dict[int, Group] = {}
        errors: list[Exception] = []

        async def ask(i: int, scope: trio.CancelScope) -> None:
            try:
                groups[i] = await self._counter.ask(wanted.prompts[i], wanted.n, wanted.sampling, wanted.affinity)
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

        def make() -> Answer:
            return Answer(self._name, wanted, ordered, self._text, chat=chat)

        return await trio.to_thread.run_sync(make, limiter=self._threads)

    def _stream(self, wanted: Wanted, chat: bool) -> Streaming:
        """Its head is out already, so what goes wrong now is told as an event."""

        async def stream(say: Say) -> None:
            over = trio.Event()
            parts: Iterable[bytes] = ()

            async def work() -> None:
                nonlocal parts
                try:
                    answer = await self._answer(wanted, chat)
                    parts = answer.events()
                except (Impossible, NoNodes, Overloaded, PeerError, trio.TooSlowError) as error:
                    why = str(error) or "No node finished this in time."
                    parts = (event({"error": {"message": why, "type": "server_error", "code": 503}}),)
                over.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
                while not over.is_set():
                    with trio.move_on_after(KEEP_ALIVE_S):
                        await over.wait()
                    if not over.is_set():
                        await say(b": waiting\n\n")
            for part in parts:
                await say(part)

        return stream


def _decode(request: Request, kind: type[Any]) -> Any:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("Content-Type: application/json, please.")
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body cannot be read: {error}.") from error
