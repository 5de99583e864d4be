"""vLLM's side of swarm-node. vLLM calls `register` in each of its processes (`vllm.general_plugins`)."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in another environment.

__all__ = ["register"]

BACKEND = "swarm"


def register() -> None:
    """Make `swarm` known as a weight-transfer backend and as a load format. Engines with neither stay as they are."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, f"{__name__}.rank", "SwarmEngine")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from .cpu import keep_weights_in_place

        keep_weights_in_place()
    from . import core, loader, scores  # noqa: F401 - the loader registers itself, as the load format of the same name

    core.install()
    scores.install()
