"""The status of a swarm that does not exist, of any size and at any moment: for looking at the page, and for measuring
what it costs. Nothing here is measured; a real seed's status has the same types."""

import math
import random
from typing import Final

from node.status.schema import (
    CheckCounts,
    EgressStatus,
    LedgerStatus,
    MemberStatus,
    PieceMap,
    QuarantineStatus,
    SavedStateStatus,
    SeedStatus,
    Step,
    TimeSplit,
)

__all__ = ["made_up_status"]

STRIPES: Final = 8
EVERY_S: Final = 20.0
"""A version is published this often."""
TAKES_S: Final = 9.0
"""The last node has it after this long."""
MODEL_BYTES: Final = 16_380_000_000
CHUNKS: Final = 148
FAN_OUT: Final = 7
GPUS: Final = ("a100", "h100", "l40s", "rtx4090", "rtx3090")


def made_up_status(nodes: int, at_s: float, seed: int = 1) -> SeedStatus:
    """A seed's status with `nodes` members, `at_s` seconds after the start of the run. The same arguments give the same
    status, and it changes with `at_s` as a real one does."""
    chance = random.Random(seed)
    number = int(at_s // EVERY_S) + 1
    age_s = at_s % EVERY_S
    head, before = (0, number), (0, number - 1)
    members = [_member(slot, chance, at_s) for slot in range(nodes)]
    order = list(range(nodes))
    chance.shuffle(order)
    for rank, slot in enumerate(order):
        behind = age_s < TAKES_S * (rank + 1) / nodes
        members[slot].held = before if behind else head
        if members[slot].engine is not None:
            members[slot].engine = before if behind else head
    stripes = [_tree(nodes, stripe, chance) for stripe in range(STRIPES)]
    for parents in stripes:
        for child, parent in parents.items():
            if parent is not None:
                members[child].senders[parent] = round(chance.uniform(15, 120), 1)
    _trouble(members)
    steps = [_step(version, nodes, EVERY_S, seed) for version in range(max(1, number - 20), number)]
    steps.append(_step(number, nodes, age_s, seed))
    tokens_s = sum(member.tokens_s for member in members)
    accepted = int(1.9 * nodes * at_s)
    return SeedStatus(
        swarm="12D3KooWQ3xYvGxmhz2bT7uRk9p8V4n6Lw1sDfCeA5jHtKuMadeUp",
        head=head,
        saved_states=[
            SavedStateStatus(
                step=number, size_bytes=4 * MODEL_BYTES, age_s=age_s,
                whole=True, fragments=12, needed=6, held=12, nodes=12,
            )
        ],
        root=f"{number:064x}",
        model_bytes=MODEL_BYTES,
        addrs=["/ip4/203.0.113.7/tcp/4001"],
        sent_bytes=number * 74_000_000,
        control_bytes=number * 210_000,
        egress=EgressStatus(copies=1.2, version=head, payload_bytes=74_000_000, sent_bytes=74_100_000,
                            budget_bytes=88_800_000),
        nodes=members,
        stripes=stripes,
        steps=steps,
        work=LedgerStatus(
            groups_open=4 * nodes, samples_free=3 * nodes, samples_leased=12 * nodes, tokens_per_s=tokens_s,
            generating=0.94, useful=0.91, samples_used=accepted - 8 * nodes, samples_unused=accepted // 40,
            unused={"too old": accepted // 40}, accepted=accepted,
            refused={"version too old": accepted // 60, "lease expired": accepted // 200},
            checks=CheckCounts(begun=accepted // 50, confirmed=accepted // 51, open=2),
        ),
        pieces=_pieces(head, age_s, nodes, stripes),
    )  # fmt: skip


def _member(slot: int, chance: random.Random, at_s: float) -> MemberStatus:
    gpu = chance.choice(GPUS)
    speed = chance.lognormvariate(math.log(900), 0.5) * (1 + 0.04 * math.sin(at_s / 7 + slot))
    accepted = int(speed * at_s / 450)
    return MemberStatus(
        slot=slot,
        peer=f"12D3KooW{chance.getrandbits(220):044x}",
        name=f"{gpu}-{slot:02d}",
        reached=chance.choices(("direct", "dialed us", "punched"), (6, 3, 1))[0],
        standing="fresh",
        lease_s=85.0,
        engine=(0, 0),
        sent_bytes=int(at_s * 3.6e6 * chance.uniform(0.2, 1.8)),
        received_bytes=int(at_s * 3.7e6),
        tokens_s=speed,
        accepted=accepted,
        refused={"version too old": accepted // 50} if accepted > 50 else {},
        useful=chance.uniform(0.85, 0.97),
        seconds=TimeSplit(generate=0.93 * at_s, wait_work=0.03 * at_s, wait_version=0.03 * at_s, commit=0.01 * at_s),
        outstanding=chance.randrange(8, 24),
        uplink_mbit=round(chance.lognormvariate(math.log(200), 0.5), 1),
    )


def _trouble(members: list[MemberStatus]) -> None:
    """What goes wrong in any swarm of some size."""
    if len(members) >= 16:
        members[5].reached = "circuit"
        members[9].standing, members[9].lease_s, members[9].held = "soft", 41.0, (0, 0)
        members[12].quarantine = QuarantineStatus(why="other nodes compute other probabilities for its samples")
        members[14].engine, members[14].tokens_s = None, 0.0


def _tree(nodes: int, stripe: int, chance: random.Random) -> dict[int, int | None]:
    """One stripe: its interior nodes are those of its own share of the slots."""
    interior = [slot for slot in range(nodes) if slot % STRIPES == stripe % max(1, min(STRIPES, nodes))]
    parents: dict[int, int | None] = {}
    for index, slot in enumerate(interior):
        parents[slot] = None if index == 0 else interior[(index - 1) // 2]
    leaves = [slot for slot in range(nodes) if slot not in parents]
    chance.shuffle(leaves)
    for index, slot in enumerate(leaves):
        parents[slot] = interior[min(len(interior) - 1, index // FAN_OUT)] if interior else None
    return parents


def _step(number: int, nodes: int, age_s: float, seed: int) -> Step:
    """A version, `age_s` after the begin of its publish."""
    chance = random.Random(seed * 1000 + number)
    took_s = TAKES_S * chance.uniform(0.92, 1.15)
    done = age_s > took_s
    seen_s = took_s if done else age_s
    held = nodes if done else min(nodes, int(nodes * seen_s / took_s))
    size = int(74e6 * chance.uniform(0.9, 1.1))
    return Step(
        version=(0, number),
        density=0.0103 * chance.uniform(0.9, 1.1),
        bits_per_change=7.15,
        delta_bytes=size,
        trainer_sent_bytes=int(1.004 * size),
        trainer_copies=1.004,
        first_chunk_s=0.08,
        extract_s=min(seen_s, 2.4),
        publish_to_first_s=took_s / 2 if seen_s > took_s / 2 else None,
        publish_to_half_s=0.8 * took_s if seen_s > 0.8 * took_s else None,
        publish_to_all_s=took_s if done else None,
        age_s=seen_s,
        held=held,
        waiting=nodes - held,
        engines=held,
        pause_s=chance.uniform(0.015, 0.04) if done else None,
    )


def _pieces(head: tuple[int, int], age_s: float, nodes: int, stripes: list[dict[int, int | None]]) -> PieceMap:
    arrived = min(1.0, age_s / (0.8 * TAKES_S)) * CHUNKS
    root_children = [next((child for child, parent in tree.items() if parent is None), -2) for tree in stripes]
    have = [round(max(0.0, min(1.0, arrived - chunk)), 3) for chunk in range(CHUNKS)]
    giver = [root_children[chunk * 5 % STRIPES] if have[chunk] and nodes else -2 for chunk in range(CHUNKS)]
    return PieceMap(version=head, sealed=age_s > 2.4, chunks=CHUNKS, have=have, giver=giver)
