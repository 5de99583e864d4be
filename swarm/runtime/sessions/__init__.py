"""Sessions with peers: one control stream in both directions, and bulk streams for pieces.

`inbound` verifies every byte that arrives before anything else sees it; `outbound` and `pacing` decide the order and
the rate in which bytes leave. `peers` decides what an error in a session means.

Modules:

- `blob_service`: What this member gives on request, and checks of what it requested
- `bulk`: The bulk streams towards one peer
- `inbound`: What arrives on bulk streams: verified, stored, posted to the core
- `outbound`: The queue of one bulk stream, and the task that writes it
- `pacing`: One queue for the machine's uplink, shared by all bulk streams
- `peers`: All sessions of one runtime: accepted, dialed, crossed, banned
- `requests`: Open requests to one peer, and what has arrived of each answer
- `session`: One session with one peer
"""
