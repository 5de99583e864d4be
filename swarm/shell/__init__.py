"""The shell: carries out what the core decides, on trio, with a transport, a store and worker threads.

Here are the names that a relay needs. What decodes models (`jobs`, `model`, `answers`, `seed`) is imported from its own
module, because it loads a compiler.
"""

from swarm.shell.counts import Counts
from swarm.shell.limits import Limits
from swarm.shell.manifests import Manifests
from swarm.shell.runtime import Core, Face, Shell
from swarm.shell.threads import RunSync, here_and_now, in_thread

__all__ = ["Core", "Counts", "Face", "Limits", "Manifests", "RunSync", "Shell", "here_and_now", "in_thread"]
