"""The swarm as the SGLang engine, and the router, that slime and miles ask for tokens: a few of SGLang's routes.

    python -m node.trainers.slime_engine --gateway http://127.0.0.1:8000 --at 127.0.0.1:30000 --gpus 8

slime is started with `--rollout-external-engine-addrs 127.0.0.1:30000 --sglang-router-ip 127.0.0.1
--sglang-router-port 30000`. It counts the swarm as `--gpus` GPUs, from which its number of requests at a time follows;
miles wants an engine of one GPU. Pausing, flushing and pulling weights do nothing: `node.trainers.slime` publishes, and
nodes apply a version between two steps of their engines. For slime at commit 624b824a and miles at 31f1ca96.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from codec.errors import SwarmError, UsageError
from node.http import Request, Response, failure, json_response
from node.settings.given import api_key
from node.trainers.gateway_client import GatewayClient, GatewayRefused
from node.trainers.serving import serve_until_interrupted

__all__ = ["Engine", "main"]

SESSION: Final = "x-smg-routing-key"
"""The header by which slime, miles and SGLang's router name what the turns of a conversation have in common."""
_RENAMED: Final = {"max_new_tokens": "max_tokens", "sampling_seed": "seed",
                   "no_stop_trim": "include_stop_str_in_output"}  # fmt: skip
_DROPPED: Final = {"spaces_between_special_tokens"}  # of the text, which slime makes again from the tokens
_ONE_GPU: Final = {"tp_size": 1, "pp_size": 1, "ep_size": 1, "dp_size": 1, "nnodes": 1, "node_rank": 0,
                   "base_gpu_id": 0, "gpu_id_step": 1, "enable_memory_saver": False}  # fmt: skip
_DONE: Final = ("pause_generation", "continue_generation", "pull_weights", "update_weights_from_disk", "flush_cache",
                "health", "health_generate", "workers")  # fmt: skip


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool = True
    rid: str | None = None
    """The caller's name for it, by which it may be aborted."""


class _Abort(msgspec.Struct):
    rid: str | None = None
    """None: abort all."""


class Engine:
    """The routes of one address."""

    def __init__(self, gateway: GatewayClient, gpus: int = 1) -> None:
        """`gpus`: as how many slime counts the swarm."""
        self._gateway, self._gpus = gateway, gpus
        self._drawing: dict[trio.CancelScope, str | None] = {}
        """The requests that are being answered, and their `rid`."""

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        if "origin" in request.headers:
            return failure(403, "Web pages may not speak to this server.")
        match request.method, request.path:
            case "POST", "/generate":
                return await self._generate(bytes(request.body), request.headers.get(SESSION, ""))
            case "GET", "/server_info" | "/get_server_info":
                host, _, port = request.headers.get("host", "").rpartition(":")
                where = {"host": host, "port": int(port) if port.isdecimal() and len(port) < 6 else 0}
                return json_response({"num_gpus": self._gpus} | where | _ONE_GPU)
            case "GET", "/v1/loads":
                return json_response({"loads": [{"num_running_reqs": len(self._drawing), "num_waiting_reqs": 0}]})
            case "POST", "/abort_request":
                return self._abort(bytes(request.body))
            case "GET", "/workers":  # of the router: this address, so that slime's aborts come here
                return json_response({"workers": [{"url": f"http://{request.headers.get('host', '')}"}]})
            case _, path if path[1:] in _DONE:
                return json_response({"success": True, "message": ""})
        return failure(404, f"There is no {request.path} here.")

    async def _generate(self, body: bytes, session: str) -> Response:
        """A sample, as SGLang answers; after an abort, one without tokens."""
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except msgspec.DecodeError as error:
            return failure(400, f"The swarm generates from tokens, without images or routes of experts: {error}.")
        sampling = {_RENAMED.get(key, key): value for key, value in asked.sampling_params.items()
                    if key not in _DROPPED and value is not None}  # fmt: skip
        request = {"prompt": asked.input_ids, "logprobs": 0} | sampling
        choice: dict[str, Any] | None = None
        try:
            with self._abortable(asked.rid):
                choice = await self._gateway.draw(request, session)
        except GatewayRefused as refused:
            return Response(refused.status, refused.body)
        except SwarmError as error:
            return failure(503, str(error))
        if choice is None:
            return _answer("", "abort", [], "")
        pairs = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
        newest = ".".join(map(str, max(map(tuple, choice["versions"]))))
        return _answer(choice["text"], choice["finish_reason"], [(*p, None) for p in pairs], newest)

    def _abort(self, body: bytes) -> Response:
        try:
            rid = msgspec.json.decode(body or b"{}", type=_Abort).rid
        except msgspec.DecodeError as error:
            return failure(400, f"/abort_request: {error}.")
        for scope, name in self._drawing.items():
            if rid in (None, name):
                scope.cancel()
        return json_response({"success": True, "message": ""})

    @contextmanager
    def _abortable(self, rid: str | None) -> Iterator[None]:
        """A block that an abort of `rid`, or of all, ends early."""
        with trio.CancelScope() as scope:
            self._drawing[scope] = rid
            try:
                yield
            finally:
                del self._drawing[scope]


def _answer(text: str, why: str, tokens: list[tuple[float, int, None]], version: str) -> Response:
    meta = {"finish_reason": {"type": why}, "output_token_logprobs": tokens, "completion_tokens": len(tokens)}
    return json_response({"text": text, "meta_info": meta | {"weight_version": version}})


def main(words: list[str] | None = None) -> int:
    """Serve until interrupted. `words`: the command line (default: this process's). Returns the exit code."""
    parser = argparse.ArgumentParser("python -m node.trainers.slime_engine")
    for name, default, what in (
        ("--gateway", "http://127.0.0.1:8000", "its URL"), ("--at", "127.0.0.1:30000", "address to listen on"),
        ("--gpus", 1, "as how many slime counts the swarm"),
    ):  # fmt: skip
        parser.add_argument(name, default=default, type=type(default), help=f"{what} (default: %(default)s)")
    parser.add_argument("--api-key-file", type=Path, help="file with one of its keys (default: SWARM_API_KEY, or none)")
    options = parser.parse_args(words)
    try:
        gateway = GatewayClient(
            options.gateway, api_key=api_key(os.environ.get("SWARM_API_KEY", ""), options.api_key_file)
        )
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return serve_until_interrupted(Engine(gateway, options.gpus), options.at, within=gateway)


if __name__ == "__main__":
    sys.exit(main())
