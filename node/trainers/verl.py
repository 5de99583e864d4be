"""verl on the swarm, without a change to it: a checkpoint engine that publishes, and a rollout whose servers are nodes.

    VERL_USE_EXTERNAL_MODULES=node.trainers.verl python -m verl.trainer.main_ppo ... \\
        trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False \\
        actor_rollout_ref.rollout.name=swarm actor_rollout_ref.rollout.checkpoint_engine.backend=swarm \\
        +actor_rollout_ref.rollout.engine_kwargs.swarm.url=http://127.0.0.1:8000

`url` is the URL of a `swarm-node gateway`; the seed is found by SWARM_HOME. Implements the `CheckpointEngine` and the
`RolloutReplica` of verl 0.9.1, and registers both as "swarm". A replica takes no GPU, since nodes outside verl's
cluster generate the tokens.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # pyright: ignore[reportMissingImports]
from verl.workers.rollout import replica  # pyright: ignore[reportMissingImports]

from codec.errors import UsageError
from node.trainers.api import Swarm
from node.trainers.gateway_client import GatewayClient
from node.trainers.prefix_sessions import PrefixSessions
from node.trainers.published_steps import PublishedSteps

__all__ = ["SwarmCheckpointEngine", "SwarmReplica", "SwarmServer"]


@CheckpointEngineRegistry.register("swarm")
class SwarmCheckpointEngine(CheckpointEngine):
    """The trainer's side: all ranks gather each tensor together, and rank 0 publishes it."""

    def __init__(
        self, bucket_size: int, is_master: bool = False, home: str = "", base: str = "", quorum: float = 0.0,
        timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        """`bucket_size`, `is_master`: from verl. `home`, `base`: as for `Swarm.attach`.

        `quorum`: the share of live nodes, 0 to 1, that must hold a version before verl goes on; with 0 it goes on when
        the version is sealed. `timeout_s`: for each wait.
        """
        self._is_master, self._home, self._base = is_master, home, base
        self._quorum, self._timeout_s = quorum, timeout_s
        self._swarm: Swarm | None = None

    def prepare(self) -> dict[str, Any]:
        """Returns no metadata: the swarm needs none."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Returns no topology: there is no process group to join."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Attach, once, on the rank that publishes. Raises what `Swarm.attach` raises."""
        if self._is_master and self._swarm is None:
            self._swarm = Swarm.attach(home=self._home or None, base=self._base or None)

    def finalize(self) -> None:
        """The swarm stays attached from step to step."""

    async def send_weights(self, weights: Iterator[tuple[str, Any]], global_steps: int | None = None) -> dict[str, Any]:
        """Publish (checkpoint name, full tensor) pairs as the next version, and return metrics of it.

        Raises what `Swarm.publish` and `Publication.wait` raise.
        """
        publication = None
        try:
            if self._swarm is not None:
                publication = self._swarm.publish(weights, step=global_steps or 0, timeout_s=self._timeout_s)
        finally:
            for (
                _
            ) in weights:  # each tensor is gathered by a collective: a rank that stopped early would block the others
                pass
        if publication is None:
            return {}
        publication.wait(self._quorum, self._timeout_s)
        metrics = {f"swarm/{stage}_s": seconds for stage, seconds in publication.seconds.items()}
        return metrics | {"swarm/bytes": float(publication.bytes or 0), "swarm/density": publication.density or 0.0}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Raises `UsageError`: nodes get versions from the swarm, and other replicas would keep their old weights."""
        raise UsageError("Only rollout.name=swarm takes its weights from the swarm; give other replicas verl's own.")
        yield  # an async generator, as verl expects


class SwarmServer:
    """An inference server for verl: asks the swarm's gateway, and remembers which step became which version."""

    def __init__(self, url: str, room: int, api_key: str = "", timeout_s: float = 600.0) -> None:
        """`url`: the gateway's, without /v1. `room`: the most tokens of a prompt and its answer together, used where
        verl does not say how many to generate. `api_key`: one of the gateway's. `timeout_s`: for each answer. Raises
        `UsageError` for what is no URL.
        """
        self._gateway = GatewayClient(url, api_key=api_key, timeout_s=timeout_s)
        self._room, self._step = room, 0
        self._published = PublishedSteps()
        self._sessions = PrefixSessions()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **more: Any
    ) -> replica.TokenOutput:
        """One sample, with the oldest and the newest step whose weights generated it.

        verl's clients give each turn of a conversation a `request_id` of its own, so a turn is known by its tokens,
        which begin with those of the turn before it. Raises `UsageError` for input that is not tokens, such as images,
        and what `GatewayClient.draw` raises.
        """
        if unsupported := [name for name, value in more.items() if value and name != "priority"]:
            raise UsageError(f"The swarm's engines read tokens only, not {', '.join(unsupported)}.")
        limits = (sampling_params.get(name) for name in ("max_tokens", "max_new_tokens"))
        max_tokens = next(filter(None, limits), self._room - len(prompt_ids))
        request = sampling_params | {"prompt": list(prompt_ids), "max_tokens": max_tokens, "logprobs": 0}
        request.pop("max_new_tokens", None)
        session = self._sessions.find(prompt_ids, request_id)
        choice = await self._gateway.draw(request, session)
        self._sessions.note([*prompt_ids, *choice["token_ids"]], session)
        steps = [self._published.step_of((epoch, version), self._step) for epoch, version in choice["versions"]]
        spans = {"global_steps": min(steps), "min_global_steps": min(steps), "max_global_steps": max(steps)}
        sample = {"token_ids": choice["token_ids"], "log_probs": choice["logprobs"]["token_logprobs"]}
        return replica.TokenOutput(**sample, stop_reason="completed", extra_fields=spans)

    async def update_weights(self, global_steps: int | None = None) -> None:
        """Note which step verl is publishing."""
        self._step = global_steps or 0

    async def execute_checkpoint_engine(self, method: str, **_: Any) -> dict[str, Any]:
        """On "finalize", note the gateway's newest version as that of the step: verl has waited until it is sealed."""
        if method == "finalize":
            self._published.note(await self._gateway.newest_version(), self._step)
        return {}


class SwarmReplica(replica.RolloutReplica):
    """One actor in place of an engine. It is never paused: nodes apply a version between two steps of their engines."""

    async def init_standalone(self) -> None:
        """Launch the actor, in verl's mode for servers outside the trainer's process group."""
        self.rollout_mode = replica.RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Launch the actor. Raises `UsageError` without a gateway's URL, or for replicas on the trainer's own GPUs."""
        options = dict(self.config.engine_kwargs.get("swarm") or {})
        if self.rollout_mode is not replica.RolloutMode.STANDALONE or "url" not in options:
            raise UsageError("Set hybrid_engine=False, and rollout.engine_kwargs.swarm.url to a gateway's URL.")
        actor = ray.remote(num_cpus=0, max_concurrency=self.max_concurrency)(SwarmServer)
        self._server_handle = actor.remote(room=self.config.prompt_length + self.config.response_length, **options)
        self._server_address = f"{options['url']}#{self.replica_rank}"
        self.workers = [self._server_handle]


replica.RolloutReplicaRegistry.register("swarm", lambda: SwarmReplica)
