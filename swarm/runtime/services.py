"""A replica and what a member does with it. A relay has none of this, and imports none of it."""

from dataclasses import dataclass

from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.replica.jobs import Jobs
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.replica.model import Model
from swarm.runtime.sessions.blob_service import BlobService
from swarm.runtime.threads import RunSync, in_thread
from swarm.store import Store

__all__ = ["ReplicaServices"]


@dataclass(frozen=True, slots=True)
class ReplicaServices:
    """What needs a model: `jobs` changes the replica's bits; `blobs` gives blocks and files to peers, and takes
    theirs."""

    jobs: Jobs
    blobs: BlobService

    @classmethod
    def build(
        cls, store: Store, model: Model, manifests: Manifests, limits: RuntimeLimits, run_sync: RunSync = in_thread
    ) -> "ReplicaServices":
        """The services of `model`, which keeps its files in `store`."""
        jobs = Jobs(store, model, manifests, limits, run_sync)
        return cls(jobs, BlobService(store, jobs, manifests, run_sync))
