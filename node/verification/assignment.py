"""Which rollouts are checked, and by whom, from a nonce that is older than them and that no node knows.

The seed publishes the hash of a period's nonce when the period begins. A node signs its rollout, and the seed makes it
durable. Only then the nonce and the signed bytes decide, as one hash, whether it is checked and in which order checkers
are asked. When the period is over the nonce is published, so that every node can verify that the seed picked nobody by
hand. A node that tries many rollouts for one prompt gains nothing by it, because it does not know the nonce.

Each author has a *panel*: the few nodes that check it, drawn by a secret that is never published, and the same as long
as they are there. Evidence is kept by checker, so that a few checkers who see much find a cheat sooner than many who
see little each. Of the panel, the nonce draws who is asked about a rollout.

The share that is checked falls from 1 for a new node to `FLOOR`, and rises with the evidence against it. It depends on
the past alone, so it does not touch the validity of `node.verification.evidence`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from blake3 import blake3

from node.verification.classes import ArithmeticClass
from node.verification.evidence import LEAST_CHECKERS, dropped

__all__ = [
    "FIRST",
    "FLOOR",
    "LEARNING",
    "PANEL",
    "check_share",
    "checkers",
    "commitment",
    "framed",
    "is_checked",
    "most_checked",
    "nonce_of",
    "opens",
    "panel",
    "wants_more",
]

FIRST: Final = 16
"""A node's first samples, which are all checked."""
LEARNING: Final = 256
"""A node's first samples, which are all checked until it can be compared with honest traffic of its class."""
FLOOR: Final = 0.01
"""The share of an old node's samples that is checked."""
PANEL: Final = 8
"""Checkers of one author: it is framed only if five of them collude, and three that shield it do not save it. In a
class of nine nodes or fewer the panel is everybody else, so half of them may lie. More checkers would need more
evidence, because each has a product of its own."""
MORE_OPINIONS: Final = 1 / 16
"""The share of checks for which three nodes are asked although nothing is suspicious, so that checkers are compared."""
MORE_AT_FIRST: Final = 1 / 4
"""The same for a node's first `LEARNING` samples: what honest checkers differ by is learned then."""
SECRET_PERIOD: Final = 2**64 - 1
"""The number of the period whose nonce is never published."""
_WORD: Final = float(1 << 53)


def nonce_of(secret: bytes, period: int) -> bytes:
    """The nonce of a period. `secret`: 32 bytes that only the seed knows."""
    return blake3(b"check nonce" + period.to_bytes(8, "little"), key=secret).digest()


def commitment(nonce: bytes) -> bytes:
    """What is published before the period."""
    return blake3(b"check commitment" + nonce).digest()


def opens(nonce: bytes, published: bytes) -> bool:
    """Whether the nonce that was shown after the period is the one that was committed to."""
    return commitment(nonce) == published


def _lot(nonce: bytes, what: bytes, signed: bytes, node: bytes = b"") -> float:
    """A uniform number in [0, 1)."""
    digest = blake3(what + blake3(signed).digest() + node, key=nonce).digest(8)
    return (int.from_bytes(digest, "little") >> 11) / _WORD


def check_share(samples: int, log_evidence: float = 0.0, floor: float = FLOOR, *, measured: bool = True) -> float:
    """The share of a node's samples to check after `samples` were accepted, with this evidence (a logarithm).

    `measured`: it was compared with honest traffic already."""
    if samples < (FIRST if measured else LEARNING):
        return 1.0
    suspicion = math.exp(min(max(log_evidence, 0.0), 20.0) / 3.0)
    return min(1.0, max(floor + (1.0 - floor) * FIRST / (samples + 1), floor * suspicion))


def most_checked(samples: int) -> float:
    """A bound on the expected number of checked samples of a node without evidence against it, after `samples`."""
    if samples <= FIRST:
        return float(samples)
    return FIRST + FLOOR * (samples - FIRST) + FIRST * math.log(samples / FIRST)


def is_checked(nonce: bytes, signed: bytes, share: float) -> bool:
    """Whether a signed rollout, which is durable, is checked."""
    return _lot(nonce, b"check", signed) < share


def wants_more(nonce: bytes, signed: bytes, samples: int) -> bool:
    """Whether three nodes are asked about a rollout that is checked, to compare the checkers; `samples`: how many of
    its node's were accepted before."""
    return _lot(nonce, b"more opinions", signed) < (MORE_AT_FIRST if samples < LEARNING else MORE_OPINIONS)


def panel(
    secret: bytes, author: bytes, nodes: Mapping[bytes, ArithmeticClass], suspects: Iterable[bytes] = ()
) -> list[bytes]:
    """The nodes that check `author`: of its own class where that has enough of them, otherwise of all.

    `nodes`: the able ones, the author among them. One that joins or leaves changes one place of few panels.
    """
    excluded = {author, *suspects}
    others = [node for node in nodes if node not in excluded]
    own = [node for node in others if nodes[node] == nodes.get(author)]
    pool = own if len(own) >= LEAST_CHECKERS else others
    nonce = nonce_of(secret, SECRET_PERIOD)
    return sorted(pool, key=lambda node: (_lot(nonce, b"panel", author, node), node))[:PANEL]


def checkers(
    nonce: bytes,
    signed: bytes,
    author: bytes,
    nodes: Mapping[bytes, ArithmeticClass],
    suspects: Iterable[bytes] = (),
) -> list[bytes]:
    """The nodes that may check a rollout, in the order in which they are asked: the author's class first.

    `nodes`: all that hold the version, the author's class among them. `suspects`: nodes that are in quarantine.
    """
    excluded = {author, *suspects}
    own = nodes.get(author)
    lots = {node: _lot(nonce, b"checker", signed, node) for node in nodes if node not in excluded}
    return sorted(lots, key=lambda node: (nodes[node] != own, lots[node], node))


def framed(colluders: int, nodes: int, checkers: int) -> float:
    """The probability that of `checkers` drawn from `nodes` more collude than may: more than `dropped` of them.

    Only then is the evidence against an honest node theirs. 0 for two colluders, whatever is drawn.
    """
    checkers = min(checkers, nodes)
    ways = math.comb(nodes, checkers)
    least = dropped(checkers) + 1
    found = sum(
        math.comb(colluders, k) * math.comb(nodes - colluders, checkers - k)
        for k in range(least, min(colluders, checkers) + 1)
    )
    return found / ways if ways else 0.0
