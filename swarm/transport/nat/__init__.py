"""Reaching peers that cannot be dialed: relays, reservations, relayed links, hole punching.

`relay` serves circuits, `reservations` keeps ours at relays, `relayed_links` dials and accepts over them, and
`punch` replaces a circuit by a direct connection.

Modules:

- `circuit`: Circuit relay v2
- `punch`: From a circuit to a connection of one's own
- `relay`: A relay's own side of circuit relay v2
- `relay_strangers`: A relay's circuits for peers that are no members yet
- `relayed_links`: Circuits that we dial or accept, and what a connection goes on over
- `reservations`: Places at relays
"""
