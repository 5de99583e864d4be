"""The messages between the driver and the plugin about adapters; see `messages`, which adds them to the others."""

import msgspec

from .policies import Policy

__all__ = ["Adapted", "AdapterLayer", "DropAdapter", "PrepareAdapter", "ProveAdapter", "SwitchAdapter"]


class AdapterLayer(msgspec.Struct, frozen=True, array_like=True):
    """A linear layer that an adapter changes: A is (rank, inputs), B (outputs, rank). `module`: its checkpoint name."""

    module: str
    rank: int
    inputs: int
    outputs: int
    scaling: float


class PrepareAdapter(msgspec.Struct, frozen=True, tag="prepare_adapter"):
    """Write an adapter where no step reads it, and read it back. Its slot's weights come with the message, as sealed
    memory: A and B of each layer in order, bf16. `adapter`: its id, the slot plus one.

    Sent only to ranks of a front whose `Front.adapters` is above 0, as are all messages about adapters.
    """

    number: int
    adapter: int
    name: str
    version: str
    layers: tuple[AdapterLayer, ...]


class ProveAdapter(msgspec.Struct, frozen=True, tag="prove_adapter"):
    """Read the adapter back that steps use now."""

    number: int
    adapter: int


class SwitchAdapter(msgspec.Struct, frozen=True, tag="switch_adapter"):
    """Between two steps: serve the version of the adapter that every rank prepared.

    `renamed`: the adapter has another name than the one before it, whose requests are aborted.
    """

    number: int
    adapter: int
    version: str
    policy: Policy
    renamed: bool


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """Between two steps: forget an adapter (0: all of them), and abort its requests."""

    number: int
    adapter: int


class Adapted(msgspec.Struct, frozen=True, tag="adapted"):
    """Answer to `PrepareAdapter` and `ProveAdapter`. `differing`: the modules whose live bits are not the adapter's.

    `covered`: by module and matrix (`MODULE.a`, `MODULE.b`), how many of its elements are live on this rank.
    `refusal`: a sentence for the user, if vLLM cannot serve the adapter; empty: it can.
    """

    number: int
    differing: tuple[str, ...] = ()
    covered: dict[str, int] = {}
    refusal: str = ""
