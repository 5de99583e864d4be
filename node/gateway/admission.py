"""Judges a request by its head alone, before its body is read: its key, origin, method, path and content type."""

from typing import Final

from node.gateway.clients import Client, Clients
from node.gateway.tokenizing import TOKENIZING
from node.http.messages import Request, RequestHead, Response, failure

__all__ = ["CHAT", "COMPLETIONS", "GENERATE", "MODEL", "Admission", "wrong_key"]

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
GENERATE: Final = "/inference/v1/generate"
MODEL: Final = "/v1/models/"
"""What a model's own path begins with."""
_POSTS: Final = (COMPLETIONS, CHAT, GENERATE, *TOKENIZING)
_GETS: Final = ("/v1/models", "/health")
_RESPONSES: Final = "/v1/responses"
_NO_RESPONSES: Final = (
    "There is no /v1/responses here, because this gateway keeps no conversations. Use /v1/chat/completions: "
    "client.chat.completions of OpenAI's client, and the chat completions model of an agent framework."
)


class Admission:
    """Of one gateway's clients."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def client(self, head: RequestHead | Request) -> Client | None:
        """Who asks; None: it has no valid key."""
        return self._clients.find(head.headers.get("authorization", ""))

    def check(self, head: RequestHead) -> Response | None:
        """None, or the refusal."""
        if "origin" in head.headers:
            return failure(403, "Web pages may not use this gateway.")
        if self.client(head) is None:
            return wrong_key()
        path = head.path.rstrip("/")
        if head.method == "POST" and path in _POSTS:
            kind = head.headers.get("content-type", "").partition(";")[0].strip().lower()
            return None if kind == "application/json" else failure(400, "Content-Type: application/json, please.")
        if head.method == "GET" and (path in _GETS or path.startswith(MODEL)):
            return failure(400, "A GET has no body here.") if head.length else None
        if path.startswith(_RESPONSES):
            return failure(404, _NO_RESPONSES)
        if path in _POSTS or path in _GETS or path.startswith(MODEL):
            return failure(405, f"{head.method[:16]} is not for {path[:64]}.")
        shown = path[:64] or "/"
        return failure(404, f"There is no {shown} here; /v1/models, /v1/completions, /v1/chat/completions.")


def wrong_key() -> Response:
    """The refusal of a client without a valid key."""
    return failure(401, "Wrong or missing API key.", "invalid_api_key")
