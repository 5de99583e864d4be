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
    """What TRL calls at each weight sync. Pauses nothing: nodes apply a version between two engine steps."""

    def __init__(self, swarm: Swarm, *, quorum: float = 0.0, timeout_s: float = 600.0) -> None:
        """`quorum`: the share of live nodes, 0 to 1, that must hold a version before TRL goes on and counts it as the
        generating one. With 0, the default, TRL goes on as soon as the weights are copied, and its `max_staleness`
        counts from the publication. `timeout_s`: for each wait, for the swarm or for the quorum.
        """
        self.swarm = swarm
        self.quorum = quorum
        self.timeout_s = timeout_s
        self.publication: Publication | None = None
        """The newest version that was published."""
        self._syncs = 0

    def init_weight_transfer(self) -> None:
        """Does nothing: the swarm is attached already."""

    def pause(self) -> None:
        """Does nothing: no node has to stop."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish (checkpoint name, tensor) pairs as the next version. Raises what `Swarm.publish` raises."""
        self.publication = self.swarm.publish(iterator, step=self._syncs, timeout_s=self.timeout_s)
        self._syncs += 1

    def resume(self) -> None:
        """Wait for the quorum, if one was asked for. Raises what `Publication.wait` raises."""
        if self.publication is not None and self.quorum > 0:
            self.publication.wait(self.quorum, self.timeout_s)

    def destroy(self) -> None:
        """Wait until the last version is sealed. Does not close the swarm. Raises what `Publication.wait` raises."""
        if self.publication is not None:
            self.publication.wait(0.0, self.timeout_s)
