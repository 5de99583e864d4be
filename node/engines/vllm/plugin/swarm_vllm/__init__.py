"""vLLM's side of swarm-node. vLLM calls `register` in each of its processes (`vllm.general_plugins`).

Modules:

- `adapter_messages`: The messages about adapters
- `adapters`: The engine core's knowledge of adapters
- `blocks`: Row by row computations whose bits depend on no other row
- `boxes`: Where a checkpoint tensor's elements are live
- `channel`: The plugin's end of the Unix socket
- `codes`: The order in which vLLM's kernel on CPUs keeps packed codes
- `core`: The engine core's side
- `cpu`: The kernels of linear layers and of attention on CPUs
- `drafted`: The draft model beside the policy
- `draws`: Portable draws and replays in a worker process
- `experts`: Layers of experts that vLLM's kernel repacks
- `fingerprint`: How this process rounds
- `front`: The API server's side
- `gates`: The front's side of the policy `drain` for adapters
- `generators`: The random numbers of sampled requests on CPUs
- `guide`: The tokens with which a text can still become what was asked for
- `images`: The images of a request
- `judging`: The front's side of judgements
- `labels`: The names of versions in vLLM's outputs
- `layers`: A layer of vLLM whose kernel keeps weights otherwise than loaders fill them
- `linears`: Linear layers with packed int4 codes
- `loader`: vLLM's first load, from the replica
- `lora`: A worker process's adapters
- `margins`: By how much claimed tokens lose against the winners of their portable draws
- `messages`: The messages between driver and plugin
- `modules`: Which modules a checkpoint tensor feeds
- `noise`: Portable draws in torch
- `options`: How tokens are drawn beyond temperature and top-p
- `pace`: Rests of a thread that works while another one generates
- `packing`: The order in which a kernel keeps the weights of experts
- `patch`: Reads a weight patch
- `policies`: What becomes of running requests at a commit
- `proposed`: The sampling parameters of proposed tokens on CPUs
- `rank`: A worker process's side
- `repacked`: Modules that keep their weights in another order than loaders put them in
- `replays`: Requests whose tokens another node claims
- `requests`: vLLM's parameters of a request that draws
- `reshape`: What sampling options do to logits
- `routed`: How a request asks for routes of experts
- `routes`: Routes of experts on CPUs
- `scores`: The log-probabilities of given tokens
- `serving`: The thread of a worker process that answers its driver
- `shared`: Shared memory that the driver passes on
- `sources`: Where weights are loaded from
- `structured`: Texts of a structure that begin in the prompt
- `switching`: The engine core's side of adapters
- `trace`: Finds the boxes of a checkpoint tensor
- `undo`: The bits that the last commit replaced on a rank
- `unwrapped`: The model as its loader knows it
- `waiting`: How the processes of a vLLM on a CPU wait for one another
- `weights`: A rank's live weights
- `rewind`: The engine core's side of scores under the version before
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

__all__ = ["register"]

BACKEND = "swarm"
"""The name of the weight-transfer backend, as `--weight-transfer-config` gives it."""


def register() -> None:
    """Register `swarm` as a weight-transfer backend and as a load format. Engines that use neither are not changed."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, f"{__name__}.rank", "SwarmEngine")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from .cpu import keep_weights_in_place

        keep_weights_in_place()
    from . import core, draws, generators, replays, rewind, routes, scores, structured, switching
    from . import loader as loader  # registers a load format

    core.install()
    rewind.install()
    draws.install()
    replays.install()
    if current_platform.is_cpu():
        routes.install()
        generators.install()
    scores.install()
    structured.install()
    switching.install()
