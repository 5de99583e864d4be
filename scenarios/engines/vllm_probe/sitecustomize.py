"""vLLM's processes fork here, which on CPUs they do not: each would import for ten seconds what its parent has."""

import multiprocessing
from typing import Any

_get_context = multiprocessing.get_context


def _forking(method: str | None = None) -> Any:
    return _get_context("fork" if method == "spawn" else method)


multiprocessing.get_context = _forking
