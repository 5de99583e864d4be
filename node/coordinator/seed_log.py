"""What the seed's log says of its members and versions: by name, with reasons."""

import shlex
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import structlog

from codec import Manifest
from node.coordinator.track import Arrived
from node.settings.config import default_home
from swarm.protocol.authority import Authority
from swarm.protocol.core.notices import LeaseExpired, MemberJoined, MemberLeft, Notice
from swarm.protocol.core.version import VersionId
from swarm.protocol.membership.tickets import BARRED

__all__ = ["SeedLog", "next_command"]

NAMES: Final = 10_000
"""Names of members that have left and are remembered, so that a line about them still has them."""
_LEFT: Final = "it was stopped"
_REMOVED: Final = "it was removed"

_log = structlog.get_logger(__name__)


def next_command(home: Path) -> str:
    """What to type when the seed is up."""
    return "swarm-node invite" + ("" if home == default_home() else f" --home {shlex.quote(str(home))}")


class SeedLog:
    """Logs what the core and the publisher tell."""

    def __init__(self, core: Authority) -> None:
        self._core = core
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def name_of(self, peer: bytes) -> str:
        """The name of a member, also of one that has just left; empty if there is none."""
        roster = self._core.state.roster
        member = None if roster is None else roster.member_of(peer)
        return self._names.get(peer, "") if member is None else member.name

    def notice(self, notice: Notice) -> None:
        """Log a notice of the core."""
        fields = notice.log_fields()
        match notice:
            case MemberJoined(peer, _, name):
                self._names[peer] = name
                self._names.move_to_end(peer)
                while len(self._names) > NAMES:
                    self._names.popitem(last=False)
                fields["members"] = self._members
            case MemberLeft(_, _, why):
                fields |= {
                    "why": _LEFT if why is None else _REMOVED if why == BARRED else why,
                    "members": self._members,
                }
            case LeaseExpired():
                fields["members"] = self._members
            case _:
                pass
        _log.info(notice.log_name, **fields)

    @property
    def _members(self) -> int:
        return len(self._core.book.leases)

    def sealed(self, manifest: Manifest, elements: int, step: int | None) -> None:
        """A version is encoded and sealed. `elements`: of the model. `step`: as the trainer counts."""
        _log.info(
            "sealed", version=str(VersionId(manifest.epoch, manifest.version)), step=step or None,
            density=round(manifest.changed / max(1, elements), 6), delta_bytes=manifest.payload_bytes,
        )  # fmt: skip

    def arrived(self, versions: Iterable[Arrived]) -> None:
        """Every member holds these versions."""
        for version, nodes, seconds in versions:
            _log.info("version_arrived", version=str(version), nodes=nodes, seconds=round(seconds, 3))
