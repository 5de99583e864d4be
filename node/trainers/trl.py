"""TRL's `AsyncGRPOTrainer` on the swarm, without a change to it: weights by deltas, samples from the gateway's URL.

    swarm = Swarm.attach(base="Qwen/dir")
    trainer = AsyncGRPOTrainer(
        model="Qwen/dir",
        args=AsyncGRPOConfig(vllm_server_base_url="http://127.0.0.1:8000"),     # swarm-node gateway
        weight_transfer=SwarmWeights(swarm),
        ...
    )

Implements `trl.experimental.async_grpo.async_grpo_trainer.WeightTransferProtocol` of TRL 1.16.0.
"""

from collections.abc import Iterator
from typing import Any

from node.trainers.api import Publication, Swarm

__all__ = ["SwarmWeights"]


class SwarmWeights:
    """What TRL calls at each weight sync. Nothing is paused: nodes take a version between two steps of their engines.

    `quorum`: the share of live nodes that must hold a version before TRL goes on (and counts it as the one that
    generates); 0, the default, goes on as soon as the weights are copied, and TRL's `max_staleness` then counts from
    the publication. `timeout_s`: for how long to wait at all, for the swarm or for the quorum.
    """

    def __init__(self, swarm: Swarm, *, quorum: float = 0.0, timeout_s: float = 600.0) -> None:
        self.swarm = swarm
        self.quorum = quorum
        self.timeout_s = timeout_s
        self.publication: Publication | None = None
        """The newest one."""
        self._syncs = 0

    def init_weight_transfer(self) -> None:
        """Nothing to set up: the swarm is attached."""

    def pause(self) -> None:
        """Nothing to pause."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish (checkpoint name, tensor) pairs as the next version. Raises what `Swarm.publish` raises."""
        self.publication = self.swarm.publish(iterator, step=self._syncs, timeout_s=self.timeout_s)
        self._syncs += 1

    def resume(self) -> None:
        """Wait for the quorum, if there is to be one. Raises `SwarmTimeout`, or why the version was not published."""
        if self.publication is not None and self.quorum > 0:
            self.publication.wait(self.quorum, self.timeout_s)

    def destroy(self) -> None:
        """Wait until the last version is out. The swarm stays attached: whoever attached it closes it."""
        if self.publication is not None:
            self.publication.wait(0.0, self.timeout_s)
