"""SGLang's side of swarm-node. SGLang calls `register` in each of its processes (`sglang.srt.plugins`).

Modules:

- `calls`: What the driver asks of the ranks between two steps
- `cuts`: Which tokens top-k, top-p and min-p leave
- `rank`: A scheduler process's side
- `requests`: Seeds, ends and prefixes of requests
- `rids`: The ids of the driver's requests
- `sampler`: Draws, and the log-probabilities of what was drawn
- `scores`: The log-probabilities of given tokens
- `serve`: Starts SGLang
- `standins`: What SGLang imports and a machine without a GPU lacks
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

__all__ = ["register"]


def register() -> None:
    """Register the sampler `swarm`, and hooks that change nothing in an SGLang without that sampler.

    Each hook is SGLang's own way for a plugin to be called (`HookRegistry`).
    """
    from sglang.srt.layers.sampler import register_sampler_backend

    from . import requests, scores
    from .sampler import BACKEND, SwarmSampler

    register_sampler_backend(BACKEND, SwarmSampler)
    requests.hook()
    scores.hook()
