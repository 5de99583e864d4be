"""SkyRL on the swarm, without a change to it: the control endpoints of an inference server, which publish its deltas.

    python -m node.trainers.skyrl --at 127.0.0.1:8100

Run it beside the seed and `swarm-node gateway`, which SkyRL asks for tokens. In SkyRL's configuration, below
`generator.inference_engine`, set `run_engines_locally=false`, `external_proxy_url` to the gateway's URL,
`external_server_urls` to this address alone, `weight_sync_backend=delta`, and `delta_weight_sync.sync_dir` to a folder
on the seed's host. When SkyRL asks to fetch a version that it has written, it is published, and the answer comes when
it is sealed. The other endpoints do nothing: nodes apply a version between two engine steps. For SkyRL 0.4.0.
"""

import argparse
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec
import trio

from codec.errors import SwarmError, UsageError
from node.http import Request, Response, failure, json_response
from node.trainers.api import Swarm
from node.trainers.connection.seedlink import home_folder
from node.trainers.delta_publisher import DeltaPublisher
from node.trainers.serving import serve_until_interrupted
from node.trainers.skyrl_deltas import publish_folder

__all__ = ["Control", "main"]

_DONE: Final = ("/health", "/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/start_weight_update",
                "/update_weights", "/finish_weight_update")  # fmt: skip


class _Base(msgspec.Struct):
    base_model_path: str


class _Init(msgspec.Struct):
    init_info: _Base


class _Fetch(msgspec.Struct):
    target_version: int
    sync_dir: str


class Control:
    """The routes of one address."""

    def __init__(self, home: Path, timeout_s: float = 600.0) -> None:
        """`home`: the seed's. `timeout_s`: for each wait until a version is sealed."""
        self._home, self._timeout_s = home, timeout_s
        self._one_at_a_time = threading.Lock()
        self._swarm: Swarm | None = None
        self._publisher: DeltaPublisher | None = None

    async def __call__(self, request: Request) -> Response:
        """Answer a request. What a retry cannot mend becomes 400, other errors 503."""
        if "origin" in request.headers:
            return failure(403, "Web pages may not speak to this server.")
        try:
            match request.path:
                case "/get_world_size":
                    return json_response({"world_size": 1})
                case "/init_weight_transfer_engine":
                    init = msgspec.json.decode(bytes(request.body), type=_Init)
                    await trio.to_thread.run_sync(self.begin, Path(init.init_info.base_model_path))
                case "/fetch_weights":
                    fetch = msgspec.json.decode(bytes(request.body), type=_Fetch)
                    await trio.to_thread.run_sync(self.fetch, Path(fetch.sync_dir), fetch.target_version)
                case path if path not in _DONE:
                    return failure(404, f"There is no {path} here.")
        except msgspec.DecodeError as error:
            return failure(400, f"{request.path}: {error}. Set weight_sync_backend=delta.")
        except UsageError as error:
            return failure(400, str(error))
        except SwarmError as error:
            return failure(503, str(error))
        return json_response({"status": "ok"})

    def begin(self, base: Path) -> None:
        """Publish the checkpoint that SkyRL's first delta is of. Raises what `Swarm.attach` and `DeltaPublisher` do."""
        with self._one_at_a_time:
            self._swarm = self._swarm or Swarm.attach(home=self._home, start=False)
            publisher = DeltaPublisher(self._swarm, self._timeout_s)
            publisher.publish_checkpoint(base, 0)
            self._publisher = publisher

    def fetch(self, folder: Path, version: int) -> None:
        """Publish SkyRL's `version`, once. `folder`: its sync_dir. Raises what `begin` raises."""
        with self._one_at_a_time:
            if self._publisher is None:
                raise UsageError("SkyRL has not told its base: start it again, after this server.")
            if version != self._publisher.published:
                publish_folder(self._publisher, folder, version)

    def close(self) -> None:
        """Disconnect. Raises what `Swarm.close` raises."""
        if self._swarm is not None:
            self._swarm.close()


def main(words: list[str] | None = None) -> int:
    """Serve until interrupted. `words`: the command line (default: this process's). Returns the exit code."""
    parser = argparse.ArgumentParser("python -m node.trainers.skyrl")
    parser.add_argument("--at", default="127.0.0.1:8100", help="address to listen on (default: %(default)s)")
    parser.add_argument("--home", help="the seed's SWARM_HOME")
    options = parser.parse_args(words)
    control = Control(home_folder(options.home))
    try:
        return serve_until_interrupted(control, options.at)
    finally:
        control.close()


if __name__ == "__main__":
    sys.exit(main())
