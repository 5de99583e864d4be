"""SGLang's side of swarm-node. SGLang calls `register` in each of its processes (`sglang.srt.plugins`).

Modules:

- `calls`: What the driver asks of the ranks between two steps
- `cuts`: Which tokens top-k, top-p and min-p leave
- `drawing`: Whether and by which seeds the swarm's sampler draws
- `options`: What the options of the driver's requests do to logits
- `rank`: A scheduler process's side
- `requests`: Ends and prefixes of requests
- `rids`: The ids of the driver's requests
- `sampler`: The swarm's sampler: draws, and the log-probabilities of what was drawn
- `scores`: The log-probabilities of given tokens
- `serve`: Starts SGLang
- `standins`: What SGLang imports and a machine without a GPU lacks
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

__all__ = ["register"]


def register() -> None:
    """Register hooks, which change nothing in an SGLang without the swarm's weight loader.

    A hook is SGLang's own way for a plugin to be called (`HookRegistry`).
    """
    from . import drawing, options, requests, scores

    drawing.hook()
    options.hook()
    requests.hook()
    scores.hook()
