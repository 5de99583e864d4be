"""Carries out the core's effects on trio, with a transport, a store and worker threads.

One task (`core_loop`) applies events to the core, one at a time; whatever the core asks for is done here, and
its result comes back as another event. Nothing here decides anything.

Modules:

- `core_loop`: The one task that applies events to the core, each peer's in its turn, and timers when they are due
- `counts`: What crossed the wire, by kind
- `event_queue`: Events waiting for the core, one queue for each peer, served by what each peer has cost so far
- `framing`: Bytes from a stream, exactly as many as asked for, and control messages with their length in front
- `limits`: The shell's own bounds
- `publishing`: The authority's way to publish
- `runtime`: Carries out a core's effects on trio
- `threads`: How work leaves the loop
"""

from swarm.runtime.counts import Counts
from swarm.runtime.limits import Limits
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.runtime import Core, Face, Shell
from swarm.runtime.threads import RunSync, here_and_now, in_thread

__all__ = ["Core", "Counts", "Face", "Limits", "Manifests", "RunSync", "Shell", "here_and_now", "in_thread"]
