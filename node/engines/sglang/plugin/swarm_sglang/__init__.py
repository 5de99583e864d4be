"""SGLang's side of swarm-node. SGLang calls `register` in each of its processes (`sglang.srt.plugins`).

Modules:

- `alike`: Linear layers and attention on CPUs, whose rows depend on no other row
- `asked`: What the driver asks of one request
- `calls`: What the driver asks of the ranks between two steps
- `cuts`: Which tokens top-k, top-p and min-p leave
- `drawing`: Whether and by which seeds the swarm's sampler draws
- `options`: What the options of the driver's requests do to logits
- `rank`: A scheduler process's side
- `requests`: Ends and prefixes of requests
- `running`: The requests that run, and what is asked of each
- `sampler`: The swarm's sampler: draws, and the log-probabilities of what was drawn
- `scores`: The log-probabilities of given tokens
- `serve`: Starts SGLang
- `standins`: What SGLang imports and a machine without a GPU lacks
- `structures`: Keeps a request's text to its structure
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

__all__ = ["register"]


def register() -> None:
    """Register hooks, which change nothing in an SGLang without the swarm's weight loader.

    A hook is SGLang's own way for a plugin to be called (`HookRegistry`).
    """
    from . import alike, drawing, requests, running, scores

    alike.hook()
    drawing.hook()
    requests.hook()
    running.hook()
    scores.hook()
