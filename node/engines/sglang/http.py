"""Requests to SGLang's API server, on this machine: JSON in, JSON or lines of JSON out."""

import http.client
import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from codec.errors import UsageError
from node.engines.base import EngineError

__all__ = ["Api"]

MOST_BYTES: Final = 256 << 20
"""Of one answer: a flight's completions with their log-probabilities."""
MOST_LINE_BYTES: Final = 32 << 20
"""Of one line of a stream."""


class Api:
    """SGLang at `url`. Each request has a connection of its own, so any thread may ask."""

    def __init__(self, url: str) -> None:
        """Raises `UsageError` for what is no URL of this machine."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise UsageError(f"{url} is no URL of an SGLang on this machine; write it like http://127.0.0.1:30000")
        self.url, self._host, self._port = url, parts.hostname, parts.port or 80

    def get(self, path: str, within_s: float) -> Any:
        """The decoded answer. Raises `EngineError`."""
        return self._ask("GET", path, None, within_s)

    def post(self, path: str, body: dict[str, Any], within_s: float) -> Any:
        """The decoded answer. Raises `EngineError`, also when SGLang says that it did not succeed."""
        answer = self._ask("POST", path, body, within_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"SGLang refused {path}: {answer.get('message', 'it does not say why')}")
        return answer

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, within_s: float) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=within_s)
        try:
            response = self._begin(connection, method, path, body)
            data = response.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise EngineError(f"SGLang's answer to {path} is too long")
            return _decoded(path, data)
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"SGLang did not answer {path}: {error}") from error
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any], within_s: float) -> Iterator[Any]:
        """The decoded lines of a stream of server-sent events. `within_s`: for each line. Raises `EngineError`.

        Closing the iterator closes the connection, on which SGLang aborts the request.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=within_s)
        try:
            response = self._begin(connection, "POST", path, body)
            while line := response.readline(MOST_LINE_BYTES + 1):
                if len(line) > MOST_LINE_BYTES:
                    raise EngineError(f"a line of SGLang's answer to {path} is too long")
                if not line.startswith(b"data:"):
                    continue
                if (data := line[5:].strip()) == b"[DONE]":
                    return
                yield _decoded(path, data)
            raise EngineError(f"SGLang's answer to {path} ended too early")
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"SGLang did not answer {path}: {error}") from error
        finally:
            connection.close()

    def _begin(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise EngineError(f"SGLang refused {path}: {response.read(2000).decode(errors='replace')}")
        return response


def _decoded(path: str, data: bytes) -> Any:
    """None for an answer without content. Raises `EngineError` for what is not JSON."""
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"SGLang's answer to {path} is not JSON") from error
