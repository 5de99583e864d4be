"""Late joiners: members whose grant is younger than the version in flight. They get it from spare uplink only.

Members that join during a step lack all chunks that were assigned before, and have nothing to give. If they were served
like the others, a crowd of them could double the time that the others wait. So a late joiner is served when little is
queued for the other children.
"""

from swarm.protocol.core.version import VersionId
from swarm.protocol.membership.lease import Leases
from swarm.protocol.membership.session import Sessions

__all__ = ["LateJoiners"]


class LateJoiners:
    """Tells which peers are late joiners of the newest version that this peer has heard of."""

    def __init__(self, sessions: Sessions, leases: Leases) -> None:
        self._sessions = sessions
        self._leases = leases
        self._newest = self._held = VersionId(0, 0)
        self._since = float("inf")
        """The authority's time at which the newest version began, as far as known."""

    def opened(self, id_: VersionId, now: float) -> bool:
        """A header of this version arrived; whether it is the first of a newer version: then nobody joined late yet."""
        if id_ <= self._newest:
            return False
        self._newest = id_
        self._since = self._leases.authority_time(now) + self._leases.silent_s(now)
        return True

    def version_held(self, id_: VersionId) -> None:
        """This peer holds the version now."""
        self._held = id_

    @property
    def early(self) -> bool:
        """Whether the newest version is incomplete here. Then planned children may still need data from here."""
        return self._held < self._newest

    def has(self, peer: bytes) -> bool:
        """Whether the grant of `peer` is younger than the newest version, by the authority's clock as far as known."""
        session = self._sessions.get(peer)
        return session is not None and session.issued > self._since
