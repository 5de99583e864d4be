"""Carries out the core's effects on trio, with a transport, a store and worker threads.

One task (`core_loop`) applies events to the core, one at a time. Everything that the core asks for is done here, and
the result comes back as another event. Nothing here makes decisions.

Modules:

- `applied`: Follows up each version that the replica has become: durable, reported, checkpointed
- `core_loop`: The one task that applies events to the core, each peer's in its turn, and timers when they are due
- `counts`: Payload bytes that crossed the wire, by kind
- `event_queue`: Events that wait for the core: one queue for each peer, served by the time that each peer has used
- `failure`: The first error that only a person can fix
- `framing`: Exact reads from a stream, and control messages behind their length
- `limits`: Bounds of the runtime: memory for each peer, and deadlines
- `publishing`: The authority's way to publish: attempts, chunks, seals
- `runtime`: Connects a core with transport, sessions, store and worker threads
- `services`: A replica and what a member does with it
- `threads`: How blocking work leaves the event loop
- `writers`: The tasks that write records and chunks to disk, many at a time

Packages:

- `replica`: The replica on this host: opened, staged, applied, checkpointed, restored
- `sessions`: Sessions with peers: one control stream in both directions, and bulk streams for pieces
"""

from swarm.runtime.core_loop import Core
from swarm.runtime.counts import Counts
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.runtime import Application, Runtime
from swarm.runtime.threads import RunSync, in_thread

__all__ = [
    "Application",
    "Core",
    "Counts",
    "Manifests",
    "RunSync",
    "Runtime",
    "RuntimeLimits",
    "in_thread",
]
