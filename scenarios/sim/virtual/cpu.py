"""The CPU seconds that a node's work costs, charged where the real peer spends them."""

from dataclasses import dataclass

__all__ = ["Costs", "Cpu"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured on the machine of the README's table: `python -m scenarios.bench.transport --mb 256` for bulk; a
    signature by `cryptography`; a message and an event by running the shells on the memory transport."""

    send_s_byte: float = 1.31e-9
    """Encrypt, frame, write."""
    receive_s_byte: float = 1.36e-9 + 0.25e-9
    """Read, decrypt, and hash with BLAKE3 at about 4 GB/s."""
    frame_s: float = 60e-6
    """Handling one frame in the runtime and the core, at either end."""
    verify_s: float = 139e-6
    """Verifying one Ed25519 signature."""
    message_s: float = 80e-6
    """Handling one control message."""

    def sending_s(self, wire: int) -> float:
        return self.frame_s + wire * self.send_s_byte

    def receiving_s(self, wire: int) -> float:
        return self.frame_s + wire * self.receive_s_byte


class Cpu:
    """Processor cores that serve work first come, first served. Several nodes may share one `Cpu`."""

    __slots__ = ("_free_at", "busy_s", "costs")

    def __init__(self, costs: Costs, cores: int = 1) -> None:
        self.costs = costs
        self._free_at = [0.0] * cores
        self.busy_s = 0.0

    def charge(self, now: float, cost_s: float) -> float:
        """Add work of `cost_s` seconds that arrives at `now`; return when it will be done."""
        free = self._free_at
        core = 0 if len(free) == 1 else free.index(min(free))
        done = (free[core] if free[core] > now else now) + cost_s
        free[core] = done
        self.busy_s += cost_s
        return done
