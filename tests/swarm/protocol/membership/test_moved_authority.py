"""How a member finds an authority that has moved to another machine."""

import random

from member_kit import tick
from protocol_kit import LAYOUT, SWARM, TUNING, admit, join_message, key_of, manifest, only

from swarm.protocol.core.events import Dial, PeerDown
from swarm.protocol.member import Peer
from swarm.protocol.startup import SavedReplica


def test_it_dials_the_addresses_of_the_roster_and_then_those_of_its_ticket() -> None:
    ticket = ("/sim/authority", "/sim/standby1", "/sim/standby2")
    peer = Peer(
        key_of(0), SWARM, ticket, join_message(), TUNING, random.Random(7), SavedReplica(manifest(0, 0), LAYOUT)
    )
    peer.start(0.0)
    admit(peer)
    effects = peer.apply(PeerDown(SWARM), 1.0)
    effects += [effect for at in range(1, 40) for effect in tick(peer, 1.0 + at)]
    dials = [dial for dial in only(effects, Dial) if dial.peer == SWARM]
    assert dials
    assert dials[0].addrs == ticket, "the roster's own address is the first of them"
