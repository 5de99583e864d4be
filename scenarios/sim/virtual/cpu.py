"""The CPU seconds that a node's work costs, charged where the real peer spends them."""

from dataclasses import dataclass

__all__ = ["Costs", "Cpu"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What real relays on two cores spent, as differences between runs of `scenarios.bench.cpu`: the relay that
    forwards less the one that only receives, and pieces of 16 KiB less pieces of 256 KiB. So a cost has everything that
    grows with its unit: transport, runtime, core and disk. `scenarios.bench.transport` has the transport's share."""

    send_s_byte: float = 0.87e-9
    """Encrypt, frame, write: 0.59 in the transport alone. The relay that forwards spent 2.58 s a GB, the other 1.65."""
    receive_s_byte: float = 1.49e-9
    """Read, decrypt (0.56 in the transport alone), hash (0.13), store: the 1.65 s a GB of the relay that only receives,
    less its frames and signatures."""
    frame_s: float = 20e-6
    """Handling one frame in the runtime and the core, at either end: with pieces of 16 KiB instead of 256 KiB each
    piece more cost 24 us to receive and 17 us to send."""
    verify_s: float = 75e-6
    """Verifying one Ed25519 signature and decoding what it is under: `codec.open_header` in a loop."""
    message_s: float = 80e-6
    """Handling one control message, by running the shells on the memory transport."""

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
