"""Guests: who came while a version was on its way. They get it from what the uplinks of others have to spare.

A crowd that joins in the middle of a step lacks all that was dealt before, and has nothing to give: were it fed like
everybody, those who were there would wait for twice as much. So a guest's turn comes when little waits for the others.
"""

from swarm.protocol.core.version import VersionId
from swarm.protocol.membership.lease import Leases
from swarm.protocol.membership.session import Sessions

__all__ = ["LateJoiners"]


class LateJoiners:
    """As one peer sees it: of the newest version that it heard of, whose grants are younger."""

    def __init__(self, sessions: Sessions, leases: Leases) -> None:
        self._sessions = sessions
        self._leases = leases
        self._newest = self._held = VersionId(0, 0)
        self._since = float("inf")

    def opened(self, id_: VersionId, now: float) -> bool:
        """Something of this version is here; True when it is the first of a newer one: nobody is its guest yet."""
        if id_ <= self._newest:
            return False
        self._newest = id_
        self._since = self._leases.authority_time(now) + self._leases.silent_s(now)
        return True

    def settled(self, id_: VersionId) -> None:
        """Our replica is this version."""
        self._held = id_

    @property
    def early(self) -> bool:
        """Whether we lack something of the newest version ourselves, as others then do that may need us."""
        return self._held < self._newest

    def has(self, peer: bytes) -> bool:
        """Whether `peer` came after the newest version had begun, by the authority's clock as far as we know it."""
        session = self._sessions.get(peer)
        return session is not None and session.issued > self._since
