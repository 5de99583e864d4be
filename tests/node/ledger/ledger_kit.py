"""What the ledger's tests share: heads, prompts, and rollouts as an honest node makes them."""

import math

from codec.sign import Key
from node.engines.base import SamplingParams
from node.ledger.messages import Rollout, VersionSpan, WorkRequest, seal_rollout, work_hash
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.rules import Ledger
from node.ledger.settings import Settings
from node.ledger.state import Head, LiveLease

KEYS = [Key(bytes([i]) * 32) for i in range(1, 5)]
ALICE, BOB, CAROL, DAVE = (key.public for key in KEYS)
KEY_OF = {key.public: key for key in KEYS}
PROMPT = pack_tokens((5, 6, 7))
SAMPLING = SamplingParams(max_tokens=4, stop_tokens=(2,), seed=9)


def root(epoch: int, version: int) -> bytes:
    return bytes([epoch, version]) * 16


def head(version: int, epoch: int = 0) -> Head:
    return Head(epoch, version, root(epoch, version))


def group_id(i: int) -> bytes:
    return i.to_bytes(16, "little")


def ledger_at(version: int = 3, *, groups: int = 1, n: int = 4, **settings: object) -> Ledger:
    """Return a ledger at this version. Its leases end only at their deadlines, unless `settings` set `silent_s`."""
    ledger = Ledger(Settings(**({"silent_s": math.inf} | settings)), head(0))
    for v in range(1, version + 1):
        ledger.advance(head(v))
    for i in range(groups):
        ledger.offer(group_id(i), "s", PROMPT, n, SAMPLING)
    for key in KEYS:
        ledger.member_up(key.public)
    return ledger


_serial = iter(range(1 << 30))


def ask(
    capacity: int, version: int = 3, epoch: int = 0, rate: float = 0.0, holding: tuple[int, ...] = ()
) -> WorkRequest:
    return WorkRequest(next(_serial), capacity, epoch, version, root(epoch, version), rate, holding)


def draw(
    lease: LiveLease,
    sample: int,
    version: int = 3,
    *,
    epoch: int = 0,
    token_ids: tuple[int, ...] = (8, 9, 2),
    finish_reason: str = "stop",
    spans: tuple[VersionSpan, ...] | None = None,
    **changes: object,
) -> Rollout:
    """Return an honest node's rollout of `sample`. `changes` overwrite the packed fields (also token ids, with
    bytes)."""
    count = len(token_ids)
    fields = {
        "lease": lease.id,
        "token": lease.token,
        "sample": sample,
        "work": work_hash(lease.group, sample, PROMPT, SAMPLING),
        "token_ids": token_ids if isinstance(token_ids, bytes) else pack_tokens(token_ids),
        "logprobs": pack_floats((-0.5,) * count),
        "finish_reason": finish_reason,
        "spans": spans or (VersionSpan(epoch, version, root(epoch, version), count),),
    }
    return Rollout(**(fields | changes))


def sealed(lease: LiveLease, rollout: Rollout) -> bytes:
    return seal_rollout(KEY_OF[lease.node], rollout)


def submit(ledger: Ledger, lease: LiveLease, rollout: Rollout, now: float, node: bytes | None = None):
    return ledger.submit(node or lease.node, rollout, sealed(lease, rollout), now)


def check_places(ledger: Ledger) -> None:
    """Check that every sample is in exactly one place, on which nodes, leases and groups agree."""
    for group in ledger.groups.values():
        assert sorted([*group.free, *group.leased, *group.done]) == list(range(group.n))
        for sample, lease in group.leased.items():
            assert sample in ledger.leases[lease].open
            assert ledger.leases[lease].group == group.id
    for lease in ledger.leases.values():
        assert lease.open
        assert all(ledger.groups[lease.group].leased[sample] == lease.id for sample in lease.open)
        assert lease.id in ledger.nodes[lease.node].leases
    for node in ledger.nodes.values():
        assert node.outstanding == sum(len(ledger.leases[lease].open) for lease in node.leases)
