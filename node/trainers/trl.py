"""TRL's `AsyncGRPOTrainer` on the swarm, without a change to it: weights by deltas, samples from the gateway's URL.

    swarm = Swarm.attach(base="Qwen/dir")
    trainer = AsyncGRPOTrainer(
        model="Qwen/dir",
        args=AsyncGRPOConfig(vllm_server_base_url="http://127.0.0.1:8000"),     # swarm-node gateway
        weight_transfer=SwarmWeights(swarm),
        ...
    )

For a LoRA adapter that is published as such, under a name that the gateway knows as a model:

    weights = SwarmWeights(swarm, adapter="math")
    trainer = AsyncGRPOTrainer(..., peft_config=LoraConfig(...), weight_transfer=weights)
    weights.follow(trainer)

Implements `trl.experimental.async_grpo.async_grpo_trainer.WeightTransferProtocol` of TRL 1.16.0.
"""

from collections.abc import Iterator
from typing import Any

from codec.errors import UsageError
from node.trainers.api import Publication, Swarm

__all__ = ["SwarmWeights"]


class SwarmWeights:
    """What TRL calls at each weight sync. Pauses nothing: nodes apply a version between two engine steps."""

    def __init__(
        self, swarm: Swarm, *, adapter: str | None = None, quorum: float = 0.0, timeout_s: float = 600.0
    ) -> None:
        """`quorum`: the share of live nodes, 0 to 1, that must hold a version before TRL goes on and counts it as the
        generating one. With 0, the default, TRL goes on as soon as the weights are copied, and its `max_staleness`
        counts from the publication. `timeout_s`: for each wait, for the swarm or for the quorum. `adapter`: publish
        only the LoRA adapter, under this name; without it, a LoRA run publishes the merged weights.
        """
        self.swarm = swarm
        self.adapter = adapter
        self.quorum = quorum
        self.timeout_s = timeout_s
        self.publication: Publication | None = None
        """The newest version that was published."""
        self._syncs = 0
        self._model: Any = None

    def follow(self, trainer: Any) -> None:
        """Publish the adapter of this `AsyncGRPOTrainer`, and have its own rollout worker ask the gateway for it.

        Call it before `trainer.train()`. A rollout worker of yours has to ask for the model `adapter` itself.
        """
        self._model = trainer.model
        own = getattr(trainer.rollout_worker, "_loop_kwargs", None)
        if own is not None and self.adapter is not None:
            own["model_name"] = self.adapter  # by default the name of the base; read when the worker starts

    def init_weight_transfer(self) -> None:
        """Does nothing: the swarm is attached already."""

    def pause(self) -> None:
        """Does nothing: no node has to stop."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish (checkpoint name, tensor) pairs, or the adapter, as the next version. Raises what `Swarm.publish`
        raises."""
        source = iterator
        if self.adapter is not None:
            if self._model is None:
                raise UsageError("SwarmWeights(adapter=...): call follow(trainer) once the trainer exists.")
            for _ in iterator:  # merged weights, of which other ranks gather their part: a collective
                pass
            source = self._model
        self.publication = self.swarm.publish(source, step=self._syncs, adapter=self.adapter, timeout_s=self.timeout_s)
        self._syncs += 1

    def resume(self) -> None:
        """Wait for the quorum, if one was asked for. Raises what `Publication.wait` raises."""
        if self.publication is not None and self.quorum > 0:
            self.publication.wait(self.quorum, self.timeout_s)

    def destroy(self) -> None:
        """Wait until the last version is sealed. Does not close the swarm. Raises what `Publication.wait` raises."""
        if self.publication is not None:
            self.publication.wait(0.0, self.timeout_s)
