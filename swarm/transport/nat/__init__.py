"""Reaching peers that cannot be dialed: relays, reservations, relayed links, hole punching.

`relay` is the relay's side. `reservations` keeps our reservations at relays, `relayed_links` dials and accepts
circuits, and `punch` replaces a circuit by a direct connection.

Modules:

- `circuit`: Circuit relay v2
- `connections`: What the parts of this package need of the transport that owns the connections
- `known_relays`: The relays that we use
- `punch`: Hole punching
- `relay`: A relay's own side of circuit relay v2
- `relay_strangers`: A relay's circuits for peers that are not members yet
- `relayed_links`: Relayed links
- `reservations`: Reservations at relays
"""
