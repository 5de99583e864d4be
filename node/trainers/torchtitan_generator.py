"""The swarm as a generator of torchtitan's RL loop: an actor with the endpoints of its `VLLMGenerator`.

It asks `swarm-node gateway` for tokens, and has no weights to pull: nodes apply a version between two steps of their
engines. For torchtitan 0.3.0, which depends on Monarch; needs httpx.
"""

from dataclasses import asdict
from typing import Any

from monarch.actor import Actor, concurrent_endpoint  # pyright: ignore[reportMissingImports]
from torchtitan.experiments.rl.types import Completion  # pyright: ignore[reportMissingImports]

from node.trainers.gateway_client import GatewayClient
from node.trainers.published_steps import PublishedSteps

__all__ = ["SwarmGenerator"]


class SwarmGenerator(Actor):
    """A generator that asks the swarm's gateway, and knows which step of the trainer became which version."""

    def __init__(self, gateway: str, api_key: str = "") -> None:
        """`gateway`: its URL, without /v1. `api_key`: one of its keys. Raises `UsageError` for what is no URL."""
        self._gateway = GatewayClient(gateway, api_key=api_key)
        self._published = PublishedSteps()

    @concurrent_endpoint
    async def generate(
        self, prompt_token_ids: list[int], *, request_id: str, routing_session_id: str | None,
        sampling_config: Any, metrics_prefix: str,
    ) -> Completion:  # fmt: skip
        """One sample, with the oldest and the newest step whose weights generated it.

        The turns of a rollout have one `routing_session_id`, which is the gateway's session. Raises what
        `GatewayClient.draw` raises.
        """
        sampling = {name: value for name, value in asdict(sampling_config).items() if value is not None}
        asked = {"prompt": prompt_token_ids, "logprobs": 0} | sampling
        choice = await self._gateway.draw(asked, routing_session_id or "")
        steps = [self._published.step_of((epoch, version), 0) for epoch, version in choice["versions"]]
        return Completion(
            min_policy_version=min(steps), max_policy_version=max(steps), request_id=request_id,
            token_ids=choice["token_ids"], token_logprobs=choice["logprobs"]["token_logprobs"],
            finish_reason=choice["finish_reason"],
        )  # fmt: skip

    @concurrent_endpoint
    async def pull_model_state_dict(self, version: int) -> None:
        """Note the gateway's newest version as that of the trainer's step `version`, which is sealed."""
        self._published.note(await self._gateway.newest_version(), version)

    @concurrent_endpoint
    async def sync_log_step(self, step: int, relative_step: int | None = None) -> None:
        """This generator logs nothing."""

    @concurrent_endpoint
    async def close(self) -> None:
        """Disconnect."""
        await self._gateway.close()
