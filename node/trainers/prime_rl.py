"""prime-rl on the swarm, without a change to it: what its orchestrator asks of inference servers, done by the swarm.

    python -m node.trainers.prime_rl --model-name Qwen/Qwen3-8B --at 127.0.0.1:8100

beside `swarm-node gateway --model-name Qwen/Qwen3-8B`, which answers `/inference/v1/generate`. In prime-rl's
configuration: `weight_broadcast.type = "filesystem"`, no inference of its own, and of the orchestrator's client
`base_url` (the gateway's) and `admin_base_url` (this one). Each checkpoint that its trainer broadcasts is published
when the orchestrator says `/update_weights`, which is answered when the nodes hold it. For prime-rl 0.8.0 (559b4477).
"""

import argparse
import sys
import threading
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from codec.errors import SwarmError, UsageError
from node.gateway.http import Request, Response, failure, json_response, serve
from node.trainers.api import Publication, Swarm
from node.trainers.connection.seedlink import ask_state, home_folder
from node.trainers.publish_files import folder_tensors

__all__ = ["Admin", "main"]

HEALTH_WITHIN_S: Final = 5.0


class Admin:
    """The routes under one address. `quorum`: the share of live nodes that must hold a version before prime-rl counts
    it as the one that generates; it is waited for `timeout_s` at most, less than prime-rl waits for an answer."""

    def __init__(self, home: Path, model_name: str, quorum: float = 1.0, timeout_s: float = 600.0) -> None:
        self._home, self._model_name = home, model_name
        self._quorum, self._timeout_s = quorum, timeout_s
        self._one_at_a_time = threading.Lock()
        self._swarm: Swarm | None = None
        self._newest: tuple[Path, Publication] | None = None

    async def __call__(self, request: Request) -> Response:
        """Where errors end: 4xx for what asking again does not mend, 5xx, which prime-rl repeats, for the rest."""
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
            case "POST", "/pause" | "/resume":  # nodes take a version between two steps of their engines
                return json_response({"status": "nothing is paused"})
            case "POST", "/update_weights":
                publication = await trio.to_thread.run_sync(self.update, _folder(bytes(request.body)))
                return json_response({"status": "ok", "version": [publication.epoch, publication.version]})
            case "POST", "/load_lora_adapter":
                return failure(
                    400, "The swarm carries whole policies: train without LoRA, or broadcast merged weights."
                )
        return failure(404, f"There is no {request.path} here.")

    def update(self, folder: Path) -> Publication:
        """Publish the checkpoint in `folder`, once however often it is asked for, and wait for the quorum.

        Raises what `Swarm.attach`, `Swarm.publish` and `Publication.wait` raise.
        """
        with self._one_at_a_time:
            if self._newest is None or self._newest[0] != folder or self._newest[1].error is not None:
                self._swarm = self._swarm or Swarm.attach(home=self._home, start=False)
                step = int("".join(filter(str.isdecimal, folder.name))[-18:] or 0)
                tensors = folder_tensors(folder, self._swarm.layout)
                self._newest = folder, self._swarm.publish(tensors, step=step, timeout_s=self._timeout_s)
            return self._newest[1].wait(self._quorum, self._timeout_s)

    def close(self) -> None:
        if self._swarm is not None:
            self._swarm.close()


def _folder(body: bytes) -> Path:
    try:
        said: Any = msgspec.json.decode(body)
        return Path(said["weight_dir"])
    except (msgspec.DecodeError, TypeError, KeyError) as error:
        raise UsageError('weight_dir: the folder of a checkpoint; set weight_broadcast.type = "filesystem".') from error


def main(words: list[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        "python -m node.trainers.prime_rl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-name", required=True, help="as prime-rl's orchestrator calls the model")
    parser.add_argument("--at", default="127.0.0.1:8100", help="address to listen on (default: %(default)s)")
    parser.add_argument("--home", help="the seed's SWARM_HOME")
    parser.add_argument("--quorum", type=float, default=1.0, help="share of live nodes to wait for (default: 1)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for how long at most (default: 600)")
    asked = parser.parse_args(words)
    host, _, port = asked.at.rpartition(":")
    admin = Admin(home_folder(asked.home), asked.model_name, asked.quorum, asked.timeout_s)

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(serve, admin, host or "127.0.0.1", int(port))
            print(f"http://{host or '127.0.0.1'}:{bound}/v1", flush=True)

    code = 0
    try:
        trio.run(run)
    except* KeyboardInterrupt:
        pass
    except* OSError as group:
        print(f"Cannot listen on {asked.at}: {group.exceptions[0]}. Choose another with --at.", file=sys.stderr)
        code = 2
    finally:
        admin.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
