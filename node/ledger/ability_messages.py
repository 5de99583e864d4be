"""The messages by which the ledger asks nodes what they can do, and which adapters their engines have."""

from typing import Annotated

import msgspec

from node.ledger.fields import MAX_ADAPTERS, AdapterName, WorkMessage

__all__ = ["Abilities", "AskAbilities", "AskAdapters", "LoadedAdapters"]


class AskAbilities(WorkMessage, frozen=True, tag=14):
    """Asks what the node's engine can do beyond what every release can; sent when there is work that needs it.

    A node of an older release drops this message, and gets no such work.
    """


class Abilities(WorkMessage, frozen=True, tag=15):
    """The answer to `AskAbilities`: names from `node.engines.base.ABILITIES`, and the engine's kind (`Engine.kind`).

    A node never sends it unasked: a seed of an older release would count it as malformed.
    """

    names: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=64)]
    kind: Annotated[str, msgspec.Meta(max_length=64)] = ""


class AskAdapters(WorkMessage, frozen=True, tag=18):
    """Asks which adapters the node's engine has loaded. Sent only to nodes that named the ability `ADAPTERS`."""


class LoadedAdapters(WorkMessage, frozen=True, tag=19):
    """The adapters that the node's engine has loaded, each as it is at the version of the node's next `WorkRequest`.

    A node that was asked says it again whenever that changes, and from time to time. It never says it unasked: a seed
    of an older release would count the message as malformed.
    """

    names: Annotated[tuple[AdapterName, ...], msgspec.Meta(max_length=MAX_ADAPTERS)]
