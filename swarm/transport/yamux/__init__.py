"""Several streams over one connection: yamux (/yamux/1.0.0), with enforced windows and bounded memory.

Stock yamux peers are served, since the wire format is theirs. `YamuxLimits` has every bound.

Modules:

- `connection`: One yamux connection
- `cost`: Budgets of a peer over all of its connections
- `frames`: Yamux on the wire
- `limits`: Every number that bounds a yamux connection
- `link`: The pipe under a yamux connection
- `stream`: One yamux stream, as a transport's `Stream`
- `window`: Flow control
"""

from swarm.transport.yamux.connection import Connection
from swarm.transport.yamux.cost import PeerBudget, PeerBudgets
from swarm.transport.yamux.limits import YamuxLimits
from swarm.transport.yamux.link import ByteLink, StreamLink
from swarm.transport.yamux.stream import YamuxStream

__all__ = ["ByteLink", "Connection", "PeerBudget", "PeerBudgets", "StreamLink", "YamuxLimits", "YamuxStream"]
