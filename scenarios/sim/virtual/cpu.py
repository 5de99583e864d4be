"""What a node's work costs: CPU seconds, charged where the real peer spends them."""

from dataclasses import dataclass

__all__ = ["Costs", "Cpu"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured on the machine of the README's table: `python -m scenarios.bench.transport --mb 256` for bulk; a
    signature by `cryptography`; a message and an event by running the shells on the memory transport."""

    send_s_byte: float = 1.31e-9
    """Encrypting, framing, writing."""
    receive_s_byte: float = 1.36e-9 + 0.25e-9
    """Reading, decrypting; and hashing with BLAKE3 at about 4 GB/s."""
    frame_s: float = 60e-6
    """A frame's turn in the shell and the core, at either end."""
    verify_s: float = 139e-6
    """One Ed25519 signature."""
    message_s: float = 80e-6
    """A control message's."""

    def sending_s(self, wire: int) -> float:
        return self.frame_s + wire * self.send_s_byte

    def receiving_s(self, wire: int) -> float:
        return self.frame_s + wire * self.receive_s_byte


class Cpu:
    """Some cores, first come first served. Nodes of one host share one."""

    __slots__ = ("_free_at", "busy_s", "costs")

    def __init__(self, costs: Costs, cores: int = 1) -> None:
        self.costs = costs
        self._free_at = [0.0] * cores
        self.busy_s = 0.0

    def charge(self, now: float, cost_s: float) -> float:
        """When work that is there now will be done."""
        free = self._free_at
        core = 0 if len(free) == 1 else free.index(min(free))
        done = (free[core] if free[core] > now else now) + cost_s
        free[core] = done
        self.busy_s += cost_s
        return done
