"""The swarm as the SGLang engine, and the router, that slime and miles ask for tokens: a few of SGLang's routes.

    python -m node.trainers.slime_engine --gateway http://127.0.0.1:8000 --at 127.0.0.1:30000 --gpus 8

slime is started with `--rollout-external-engine-addrs 127.0.0.1:30000 --sglang-router-ip 127.0.0.1
--sglang-router-port 30000`. It counts the swarm as `--gpus` GPUs, from which its number of requests at a time follows.
Pausing, flushing and pulling weights do nothing: `node.trainers.slime` publishes a version, and nodes apply it between
two steps of their engines. Needs httpx, which slime depends on. For slime at commit 624b824a and miles at 31f1ca96.
"""

import argparse
import sys
from typing import Any, Final

import httpx
import msgspec
import trio

from node.http import Request, Response, failure, json_response
from node.trainers.serving import serve_until_interrupted

__all__ = ["Engine", "main"]

WITHIN_S: Final = 3600.0
"""Time limit for a sample."""
ROUTE: Final = "/v1/completions"
BUSY: Final = (429, 503)
"""The gateway's answers after which it is asked again."""
_RENAMED: Final = {
    "max_new_tokens": "max_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_DROPPED: Final = {"spaces_between_special_tokens"}  # of the text, which slime makes again from the tokens
_DONE: Final = ("pause_generation", "continue_generation", "pull_weights", "update_weights_from_disk", "flush_cache",
                "health", "health_generate", "workers")  # fmt: skip


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool = True


class Engine:
    """The routes of one address."""

    def __init__(self, client: httpx.AsyncClient, gpus: int = 1) -> None:
        """`client`: of the gateway. `gpus`: as how many slime counts the swarm."""
        self._client, self._gpus = client, gpus
        self._drawing: set[trio.CancelScope] = set()

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        if "origin" in request.headers:
            return failure(403, "Web pages may not speak to this server.")
        match request.method, request.path:
            case "POST", "/generate":
                return await self._generate(bytes(request.body))
            case "GET", "/server_info" | "/get_server_info":
                sizes = dict.fromkeys(("tp_size", "pp_size", "ep_size", "dp_size"), 1)
                return json_response({"num_gpus": self._gpus, "enable_memory_saver": False, **sizes})
            case "GET", "/v1/loads":
                return json_response({"loads": [{"num_running_reqs": len(self._drawing), "num_waiting_reqs": 0}]})
            case "POST", "/abort_request":
                for scope in self._drawing:
                    scope.cancel()
                return json_response({"success": True, "message": ""})
            case "GET", "/workers":  # of the router: this address, so that slime's aborts come here
                return json_response({"workers": [{"url": f"http://{request.headers.get('host', '')}"}]})
            case _, path if path[1:] in _DONE:
                return json_response({"success": True, "message": ""})
        return failure(404, f"There is no {request.path} here.")

    async def _generate(self, body: bytes) -> Response:
        """A sample, as SGLang answers; after an abort, one without tokens."""
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except msgspec.DecodeError as error:
            return failure(400, f"The swarm generates from tokens, without images or routes of experts: {error}.")
        sampling = {_RENAMED.get(key, key): value for key, value in asked.sampling_params.items()
                    if key not in _DROPPED and value is not None}  # fmt: skip
        request = {"prompt": asked.input_ids, "logprobs": 0} | sampling
        with trio.CancelScope() as scope:
            self._drawing.add(scope)
            try:
                while (answer := await self._client.post(ROUTE, json=request)).status_code in BUSY:  # noqa: ASYNC110
                    await trio.sleep(float(answer.headers.get("Retry-After", 1)))
            finally:
                self._drawing.discard(scope)
            if answer.is_error:
                return Response(answer.status_code, answer.content)
            choice = answer.json()["choices"][0]
            pairs = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
            newest = ".".join(map(str, max(map(tuple, choice["versions"]))))
            return _answer(choice["text"], choice["finish_reason"], [(*p, None) for p in pairs], newest)
        return _answer("", "abort", [], "")


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
    options = parser.parse_args(words)
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(base_url=options.gateway, timeout=WITHIN_S, limits=limits)
    return serve_until_interrupted(Engine(client, options.gpus), options.at, within=client)


if __name__ == "__main__":
    sys.exit(main())
