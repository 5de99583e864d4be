"""verl on the swarm, without a change to it: a checkpoint engine that publishes, and a rollout whose servers are nodes.

    VERL_USE_EXTERNAL_MODULES=node.trainers.verl python -m verl.trainer.main_ppo ... \\
        trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False \\
        actor_rollout_ref.rollout.name=swarm actor_rollout_ref.rollout.checkpoint_engine.backend=swarm \\
        +actor_rollout_ref.rollout.engine_kwargs.swarm.url=http://127.0.0.1:8000

`url` is a `swarm-node gateway`; the seed is found by SWARM_HOME. Implements and registers as "swarm" what verl 0.9.1
calls `CheckpointEngine` and `RolloutReplica`; a replica takes no GPU: tokens are drawn by nodes outside its cluster.
"""

import asyncio
import bisect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import ray  # pyright: ignore[reportMissingImports]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # pyright: ignore[reportMissingImports]
from verl.workers.rollout import replica  # pyright: ignore[reportMissingImports]

from codec.errors import UsageError
from node.trainers.api import Swarm

__all__ = ["SwarmCheckpointEngine", "SwarmReplica", "SwarmServer"]


@CheckpointEngineRegistry.register("swarm")
class SwarmCheckpointEngine(CheckpointEngine):
    """The trainer's end: rank 0 publishes what all ranks gather together.

    `home`, `base`: as for `Swarm.attach`. `quorum`: the share of live nodes that must hold a version before verl goes
    on; with 0 it goes on when the version is sealed."""

    def __init__(
        self, bucket_size: int, is_master: bool = False, home: str = "", base: str = "", quorum: float = 0.0,
        timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        self._is_master, self._home, self._base = is_master, home, base
        self._quorum, self._timeout_s = quorum, timeout_s
        self._swarm: Swarm | None = None

    def prepare(self) -> dict[str, Any]:
        """There is nothing to tell."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """There is no group to join."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Attach, once, on the rank that publishes. Raises what `Swarm.attach` raises."""
        if self._is_master and self._swarm is None:
            self._swarm = Swarm.attach(home=self._home or None, base=self._base or None)

    def finalize(self) -> None:
        """The swarm stays attached from step to step."""

    async def send_weights(self, weights: Iterator[tuple[str, Any]], global_steps: int | None = None) -> dict[str, Any]:
        """Publish full tensors by checkpoint names; gives metrics. Raises what `publish` and `wait` raise."""
        publication = None
        try:
            if self._swarm is not None:
                publication = self._swarm.publish(weights, step=global_steps or 0, timeout_s=self._timeout_s)
        finally:
            for _ in weights:  # all ranks gather each tensor together: one that stops early leaves the others waiting
                pass
        if publication is None:
            return {}
        publication.wait(self._quorum, self._timeout_s)
        metrics = {f"swarm/{stage}_s": seconds for stage, seconds in publication.seconds.items()}
        return metrics | {"swarm/bytes": float(publication.bytes or 0), "swarm/density": publication.density or 0.0}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Raises `UsageError`: the swarm's nodes take versions by themselves, other replicas would keep their old."""
        raise UsageError("Only rollout.name=swarm takes its weights from the swarm; give other replicas verl's own.")
        yield  # an async generator, as verl expects


class SwarmServer:
    """What verl takes for an inference server: it asks the gateway at `url` (without /v1), and knows which step became
    which version. `room`: tokens of a prompt and its answer together, where verl does not say how many to draw."""

    def __init__(self, url: str, room: int, api_key: str = "", timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=1024)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout_s)
        self._room, self._step = room, 0
        self._published: list[tuple[tuple[int, int], int]] = []  # (version, verl's step), ascending

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **more: Any
    ) -> replica.TokenOutput:
        """One sample, and the oldest and newest step that drew it. Raises `UsageError` for images and the like, and
        with the gateway's sentence when it refuses."""
        if found := [name for name, value in more.items() if value and name != "priority"]:
            raise UsageError(f"The swarm's engines read tokens only, not {', '.join(found)}.")
        known = (sampling_params.get(name) for name in ("max_tokens", "max_new_tokens"))
        most = next(filter(None, known), self._room - len(prompt_ids))
        asked = sampling_params | {"prompt": list(prompt_ids), "max_tokens": most, "logprobs": 0}
        asked.pop("max_new_tokens", None)
        while (answer := await self._client.post("/v1/completions", json=asked)).status_code == 429:  # noqa: ASYNC110
            await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
        if answer.is_error:
            raise UsageError(f"The gateway said {answer.status_code}: {answer.text[:400]}")
        choice = answer.json()["choices"][0]
        steps = [self._step_of((epoch, version)) for epoch, version in choice["versions"]]
        spans = {"global_steps": min(steps), "min_global_steps": min(steps), "max_global_steps": max(steps)}
        said = {"token_ids": choice["token_ids"], "log_probs": choice["logprobs"]["token_logprobs"]}
        return replica.TokenOutput(**said, stop_reason="completed", extra_fields=spans)

    async def update_weights(self, global_steps: int | None = None) -> None:
        """verl says which step is being published."""
        self._step = global_steps or 0

    async def execute_checkpoint_engine(self, method: str, **_: Any) -> dict[str, Any]:
        """When verl finalizes, the step's version is sealed, so it is the gateway's newest."""
        if method == "finalize":
            answer = await self._client.get("/v1/models")
            epoch, version = answer.raise_for_status().json()["data"][0]["version"]
            self._published = sorted({**dict(self._published), (epoch, version): self._step}.items())
        return {}

    def _step_of(self, version: tuple[int, int]) -> int:
        """The step that became this version, or the newest one before it."""
        at = bisect.bisect_right(self._published, version, key=lambda published: published[0])
        return self._published[max(0, at - 1)][1] if self._published else self._step


class SwarmReplica(replica.RolloutReplica):
    """One actor in place of an engine; nobody pauses it: nodes take a version between two steps of their engines."""

    async def init_standalone(self) -> None:
        self.rollout_mode = replica.RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Raises `UsageError` when no gateway is named, or these should be replicas on the trainer's own GPUs."""
        options = dict(self.config.engine_kwargs.get("swarm") or {})
        if self.rollout_mode is not replica.RolloutMode.STANDALONE or "url" not in options:
            raise UsageError("Set hybrid_engine=False, and rollout.engine_kwargs.swarm.url to a gateway's URL.")
        actor = ray.remote(num_cpus=0, max_concurrency=self.max_concurrency)(SwarmServer)
        self._server_handle = actor.remote(room=self.config.prompt_length + self.config.response_length, **options)
        self._server_address = f"{options['url']}#{self.replica_rank}"
        self.workers = [self._server_handle]


replica.RolloutReplicaRegistry.register("swarm", lambda: SwarmReplica)
