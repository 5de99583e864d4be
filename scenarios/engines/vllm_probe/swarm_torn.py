"""Failures in a rewind, in which vLLM scores under the version before (`--worker-extension-cls swarm_torn.Torn`).

They are armed through vLLM's development route `/collective_rpc`, on loopback, and happen once.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import os
from typing import Any

__all__ = ["Torn"]


class Torn:
    """A mixin of vLLM's worker."""

    rank: int
    model_runner: Any
    weight_transfer_engine: Any

    def tear(self, where: str) -> int:
        """Fail the next rewind of rank 0: undoing, scoring, restoring, wrong (bits are restored), or die."""
        if self.rank != 0:
            return 0
        from swarm_vllm import undo

        runner, rewind = self.model_runner, self.weight_transfer_engine._weights.rewind
        execute, write, parts, calls = runner.execute_model, undo._write, len(rewind._old.parts), []

        def failing_write(part: Any, bits: Any) -> None:
            calls.append(part)
            if len(calls) == (parts + 1 if where in ("restoring", "wrong") else 2):
                undo._write = write
                if where == "wrong":
                    write(part, bits ^ 1)
                    return
                raise RuntimeError("the accelerator fell off the bus")
            write(part, bits)

        def failing_execute(*args: Any, **named: Any) -> Any:
            if rewind._live is None:
                return execute(*args, **named)
            if where == "die":
                os._exit(9)
            runner.execute_model = execute
            raise RuntimeError("the accelerator fell off the bus")

        if where in ("scoring", "die"):
            runner.execute_model = failing_execute
        else:
            undo._write = failing_write
        return 1
