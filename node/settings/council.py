"""The machines of a council, as the operator lists them: ID@HOST:PORT."""

from pathlib import Path
from typing import Final, NamedTuple, Protocol

from codec.errors import PeerError, UsageError
from node.settings.addresses import address

__all__ = ["COUNCIL_KEY", "CouncilAddress", "check_council", "council_addresses"]

COUNCIL_KEY: Final = "council.key"
"""In the home of each machine of a council: its own key there."""
MAX_MACHINES: Final = 7


class CouncilAddress(NamedTuple):
    """One machine: its key in the council, and where the others dial it (multiaddr text)."""

    key: bytes
    address: str

    @property
    def listen(self) -> str:
        """Where the machine itself listens: at that port, of every interface unless the address is loopback."""
        _, kind, host, _, port = self.address.split("/")
        if host.startswith("127.") or host == "::1":
            return self.address
        return f"/{'ip6' if kind == 'ip6' else 'ip4'}/{'::' if kind == 'ip6' else '0.0.0.0'}/tcp/{port}"


def council_addresses(entries: tuple[str, ...]) -> tuple[CouncilAddress, ...]:
    """The machines in `entries`. Raises `UsageError`."""
    found = [_entry(text) for text in entries]
    if len({each.key for each in found}) != len(found) or len({each.address for each in found}) != len(found):
        raise UsageError("--council: names each machine once, with an address of its own")
    if found and (len(found) % 2 == 0 or len(found) > MAX_MACHINES):
        raise UsageError(
            f"--council: an odd number of machines, 3 to {MAX_MACHINES}; one more would not let another one fail. "
            "With two machines, start a seed on the second one by hand (docs/standby.md)."
        )
    return tuple(found)


class _WithCouncil(Protocol):
    """Settings of a seed: those that a council does not go with yet, too."""

    @property
    def council(self) -> tuple[str, ...]: ...
    @property
    def raw_mb(self) -> int: ...
    @property
    def adapters(self) -> int: ...
    @property
    def format(self) -> tuple[str, ...]: ...
    @property
    def shards(self) -> int: ...
    @property
    def draft(self) -> Path | None: ...


def check_council(config: _WithCouncil) -> None:
    """Raises `UsageError` for entries that name no council, and for settings that a council does not go with."""
    if not config.council:
        return
    council_addresses(config.council)
    if config.raw_mb or config.adapters or config.format or config.shards or config.draft is not None:
        raise UsageError(
            "--council does not go with --raw-mb, --adapters, --format, --shards or --draft: leave it out."
        )


def _entry(text: str) -> CouncilAddress:
    from swarm.transport.identity import peer_id, peer_key  # here: no other command needs what it imports

    id_, at, place = text.strip().partition("@")
    try:
        key = peer_key(id_)
    except PeerError as error:
        raise UsageError(
            f"--council: {text!r} does not begin with a machine's id. Write ID@HOST:PORT, with the id that "
            "swarm-node council-id printed on that machine."
        ) from error
    where = address(place) if at else ""
    if not where or where.endswith("/tcp/0"):
        raise UsageError(f"--council: {text!r} names no port of that machine. Write {peer_id(key)}@HOST:PORT.")
    return CouncilAddress(key, where)
