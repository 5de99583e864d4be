"""What a swarm process shows: a web page of the swarm and the same in a terminal, metrics for Prometheus, its health.

`monitor` serves all of it, from a status as `node.status.schema` has it: a process that was started with `--metrics`
serves its own, and `swarm-node page` serves that of the process of its SWARM_HOME. The other modules are pure.

Modules:

- `findings`: The sentence on top of the page, and what is wrong, each with what to do
- `health`: Whether a process is ready
- `history`: The last hour of statuses, to be looked at again
- `metrics`: A status as OpenMetrics text
- `monitor`: The HTTP endpoints
- `observations`: Histograms of what a status shows of its last versions
- `top`: The page in a terminal
"""

from node.monitor.monitor import Monitor, Source, own_status, serve_monitor, status_of

__all__ = ["Monitor", "Source", "own_status", "serve_monitor", "status_of"]
