"""The settings of a standby: a machine of the council that follows, and leads when it has to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from node.settings.config import SEED_PORT, JoinConfig, PeerConfig, Preset, SeedConfig
from node.settings.council import council_addresses

__all__ = ["StandbyConfig"]

_SHARED: Final = (
    "home",
    "announce",
    "via",
    "name",
    "region",
    "up_mbit",
    "down_mbit",
    "metrics",
    "log_level",
    "log_file",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyConfig(PeerConfig):
    """Follows the seed, with everything that it acknowledges; takes over when the seed fails, or by swarm-node
    takeover."""

    council: tuple[str, ...] = ()
    """A machine that may lead the swarm, as ID@HOST:PORT (swarm-node council-id prints the ID); repeat for all three,
    this one among them: the same list on each machine."""
    key: Path | None = None
    """A copy of the swarm's key file; without it SWARM_HOME/authority.key. Copy it from the seed's machine."""
    listen: tuple[str, ...] = (f"/ip4/0.0.0.0/tcp/{SEED_PORT}",)
    """Address to listen on once this machine leads, as host:port, a port, or a multiaddr; repeat for more. Before that
    it listens on any free port."""
    model: Path | None = None
    """Folder of the base checkpoint, if this machine has it; what is missing or differs is fetched from peers."""
    ticket_file: Path | None = None
    """File that holds the ticket, so that it does not appear in a list of processes."""

    def __post_init__(self) -> None:
        PeerConfig.__post_init__(self)  # super() cannot find a slotted dataclass
        object.__setattr__(self, "council", tuple(self.council))
        if not council_addresses(self.council):
            raise UsageError("--council: name the machines that may lead the swarm, as on the seed's machine")

    def as_member(self) -> JoinConfig:
        """The settings of this machine while it follows: a node without an engine, which waits for a seed for ever."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        shared |= {"announce": (), "via": ()}
        host = self.listen[0].rsplit("/", 1)[0]
        return JoinConfig(
            **shared, listen=(f"{host}/0",), engine="none", model=self.model,
            replica="ram", wait_for_seed="36500d",
        )  # fmt: skip

    def as_seed(self, preset: Preset, base: Path) -> SeedConfig:
        """The settings of this machine while it leads. `base`: a folder; nothing is read from it."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        return SeedConfig(**shared, listen=self.listen, base=base, key=self.key, preset=preset, council=self.council)
