"""prime-rl on the swarm, without a change to it: the admin routes of an inference server, served by the swarm.

    python -m node.trainers.prime_rl --model-name Qwen/Qwen3-8B --at 127.0.0.1:8100

Run it beside `swarm-node gateway --model-name Qwen/Qwen3-8B`, which answers `/inference/v1/generate`. In prime-rl's
configuration set `weight_broadcast.type = "filesystem"`, no inference of its own, and for the orchestrator's client
`base_url` (the gateway's URL) and `admin_base_url` (this server's). When the orchestrator calls `/update_weights`, the
checkpoint that the trainer has broadcast is published, and the call returns when the nodes hold it. In a LoRA run it
calls `/load_lora_adapter` instead, and the adapter is published under prime-rl's name for it, by which the environments
then ask the gateway. For prime-rl 0.8.0 (559b4477).
"""

import argparse
import sys
import threading
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from codec.errors import SwarmError, UsageError
from node.http import Request, Response, failure, json_response
from node.trainers.api import Publication, Swarm
from node.trainers.connection.seedlink import ask_state, home_folder
from node.trainers.publish_here import folder_tensors
from node.trainers.serving import serve_until_interrupted

__all__ = ["Admin", "main"]

HEALTH_WITHIN_S: Final = 5.0
"""How long `/health` waits for the seed."""


class Admin:
    """The routes of one address."""

    def __init__(self, home: Path, model_name: str, quorum: float = 1.0, timeout_s: float = 600.0) -> None:
        """`home`: the seed's. `model_name`: as prime-rl's orchestrator calls the model.

        `quorum`: the share of live nodes, 0 to 1, that must hold a version before prime-rl counts it as the generating
        one. `timeout_s`: for that wait; prime-rl waits longer for the answer.
        """
        self._home, self._model_name = home, model_name
        self._quorum, self._timeout_s = quorum, timeout_s
        self._one_at_a_time = threading.Lock()
        self._swarm: Swarm | None = None
        self._newest: dict[str | None, tuple[Path, Publication]] = {}
        """By adapter (None: the base): the folder that was published last."""

    async def __call__(self, request: Request) -> Response:
        """Answer a request. Errors that a retry cannot mend become 4xx, others 5xx, which prime-rl retries."""
        try:
            return await self._route(request)
        except UsageError as error:
            return failure(400, str(error))
        except SwarmError as error:
            return failure(503, str(error))

    async def _route(self, request: Request) -> Response:
        if "origin" in request.headers:
            return failure(403, "Web pages may not speak to this server.")
        match request.method, request.path.removeprefix("/v1"):
            case "GET", "/health":
                await trio.to_thread.run_sync(ask_state, self._home, HEALTH_WITHIN_S)
                return json_response({"status": "ok"})
            case "GET", "/models":
                return json_response({"object": "list", "data": [{"id": self._model_name, "object": "model"}]})
            case "POST", "/pause" | "/resume":  # nodes apply a version between two steps of their engines
                return json_response({"status": "nothing is paused"})
            case "POST", "/update_weights":
                fields = _fields(bytes(request.body), "weight_dir")
                return _published(await trio.to_thread.run_sync(self.update, Path(fields["weight_dir"])))
            case "POST", "/load_lora_adapter":
                fields = _fields(bytes(request.body), "lora_name", "lora_path")
                folder, adapter = Path(fields["lora_path"]), fields["lora_name"]
                try:
                    return _published(await trio.to_thread.run_sync(self.update, folder, adapter))
                except UsageError:
                    raise
                except SwarmError as error:  # of adapters prime-rl retries 500, and not 503
                    return failure(500, str(error))
        return failure(404, f"There is no {request.path} here.")

    def update(self, folder: Path, adapter: str | None = None) -> Publication:
        """Publish the checkpoint, or the adapter, in `folder`, and wait for the quorum. A repeated call for the newest
        folder only waits.

        Raises what `Swarm.attach`, `Swarm.publish` and `Publication.wait` raise.
        """
        with self._one_at_a_time:
            newest = self._newest.get(adapter)
            if newest is None or newest[0] != folder or newest[1].error is not None:
                self._swarm = self._swarm or Swarm.attach(home=self._home, start=False)
                step = int("".join(filter(str.isdecimal, folder.name))[-18:] or 0)
                source = folder_tensors(folder, self._swarm.layout) if adapter is None else folder
                publication = self._swarm.publish(source, step=step, adapter=adapter, timeout_s=self._timeout_s)
                newest = self._newest[adapter] = folder, publication
            return newest[1].wait(self._quorum, self._timeout_s)

    def close(self) -> None:
        """Let what was published be sealed, and disconnect. Raises what `Swarm.close` raises."""
        if self._swarm is not None:
            self._swarm.close()


def _published(publication: Publication) -> Response:
    return json_response({"status": "ok", "version": [publication.epoch, publication.version]})


def _fields(body: bytes, *names: str) -> dict[str, str]:
    try:
        return {name: msgspec.json.decode(body, type=dict[str, Any])[name] + "" for name in names}
    except (msgspec.DecodeError, TypeError, KeyError) as error:
        raise UsageError(
            f'{" and ".join(names)}: what was broadcast to a folder; set weight_broadcast.type = "filesystem".'
        ) from error


def main(words: list[str] | None = None) -> int:
    """Serve until interrupted. `words`: the command line (default: this process's). Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m node.trainers.prime_rl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-name", required=True, help="as prime-rl's orchestrator calls the model")
    parser.add_argument("--at", default="127.0.0.1:8100", help="address to listen on (default: %(default)s)")
    parser.add_argument("--home", help="the seed's SWARM_HOME")
    parser.add_argument("--quorum", type=float, default=1.0, help="share of live nodes to wait for (default: 1)")
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="seconds to wait for them at most (default: 600)"
    )
    options = parser.parse_args(words)
    admin = Admin(home_folder(options.home), options.model_name, options.quorum, options.timeout_s)
    try:
        return serve_until_interrupted(admin, options.at, "/v1")
    finally:
        admin.close()


if __name__ == "__main__":
    sys.exit(main())
