"""A hostile node: what it sends instead of what its core decides, and that its lies carry its own signature."""

import random

import numpy as np
import pytest

from codec import ChunkKey
from codec.sign import Key
from node.ledger.messages import Rollout, SignedRollout, VersionSpan, decode, encode, open_rollout, seal_rollout
from scenarios.hunt.hostile import Hostility
from swarm.protocol.core.documents import Report, open_report, seal
from swarm.protocol.core.events import Effect, Send, SendPiece, SetTimer
from swarm.protocol.core.wire import HeartbeatNews, Hello, Message, Ping, Reports, Work

OWN, OTHER, SWARM = Key(b"o" * 32), Key(b"n" * 32), Key(b"s" * 32).public
PEER, THIRD = OTHER.public, Key(b"t" * 32).public
PIECE = SendPiece(PEER, 0, ChunkKey(0, 1, 0, 0), 0)


def report(key: Key) -> bytes:
    return seal(
        Report(SWARM, key.public, 1, 1, 7, bytes(32), 0, 3, 0, 3, "", 0, 0, 0.0, False, 1.0), key
    )  # fmt: skip


def rollout() -> Rollout:
    tokens = np.arange(4, dtype="<u4").tobytes()
    spans = (VersionSpan(0, 3, bytes(32), 4),)
    return Rollout(9, 5, 0, bytes(32), tokens, np.zeros(4, "<f4").tobytes(), "stop", spans)


def performed(hostility: Hostility, effect: Effect, seed: int = 1) -> list[Effect]:
    return hostility.instead_of(effect, OWN, SWARM, random.Random(seed))


def said(hostility: Hostility, message: Message, to: bytes = PEER, seed: int = 1) -> list[Message]:
    found = performed(hostility, Send(to, message), seed)
    assert all(isinstance(each, Send) and each.peer == to for each in found)
    return [each.message for each in found if isinstance(each, Send)]


def test_a_node_is_honest_until_a_fault_and_after_it() -> None:
    hostility = Hostility()
    for effect in (PIECE, Send(PEER, Ping(1)), SetTimer("tick", 1.0), Send(PEER, Reports(0, (report(OWN),)))):
        assert performed(hostility, effect) == [effect]
    hostility.withholds = hostility.eclipses = hostility.falsifies = True
    hostility.replays = hostility.forges = 1.0
    assert performed(hostility, PIECE) == []
    hostility.end()
    assert performed(hostility, PIECE) == [PIECE]
    assert said(hostility, Reports(0, (report(OWN),))) == [Reports(0, (report(OWN),))]


def test_who_eclipses_greets_its_neighbours_and_passes_nothing_on_to_them() -> None:
    hostility = Hostility(eclipses=True)
    hello = Hello(b"grant", 0, 0, 0, 0)
    assert said(hostility, hello) == [hello]
    assert said(hostility, HeartbeatNews(b"heartbeat")) == []
    assert performed(hostility, PIECE) == []
    assert said(hostility, Reports(0, (report(OWN),)), SWARM) != []


def test_what_is_sent_again_was_sent_to_that_peer_before() -> None:
    hostility = Hostility(replays=1.0)
    assert said(hostility, Ping(1), THIRD) == [Ping(1)]
    assert said(hostility, Ping(2)) == [Ping(2)]
    assert said(hostility, Ping(3)) == [Ping(3), Ping(2)]
    hostility.forget()
    assert said(hostility, Ping(4)) == [Ping(4)]


@pytest.mark.parametrize("seed", range(30))
def test_a_false_report_is_signed_and_another_and_others_reports_stay(seed: int) -> None:
    true, others = report(OWN), report(OTHER)
    (message,) = said(Hostility(falsifies=True), Reports(0, (true, others)), seed=seed)
    assert isinstance(message, Reports)
    assert message.reports[1] == others
    lie = open_report(message.reports[0], SWARM)
    assert lie.peer == OWN.public
    assert lie != open_report(true, SWARM)


@pytest.mark.parametrize("seed", range(20))
def test_a_forged_rollout_is_signed_and_another(seed: int) -> None:
    honest = Work(encode(SignedRollout(seal_rollout(OWN, rollout()))))
    (message,) = said(Hostility(forges=1.0), honest, SWARM, seed)
    assert isinstance(message, Work)
    body = decode(message.body)
    assert isinstance(body, SignedRollout)
    assert open_rollout(OWN.public, body.sealed) != rollout()
