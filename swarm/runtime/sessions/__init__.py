"""Sessions with peers: one control stream both ways, and bulk streams for pieces.

`inbound` verifies every byte that arrives before anything else sees it; `outbound` and `pacing` decide the
order and the rate in which bytes leave.

Modules:

- `answers`: What we give on request, and what comes when we ask
- `bulk`: The bulk streams towards one peer
- `inbound`: What arrives on the bulk lane
- `outbound`: What waits for one bulk stream, and the task that writes it
- `pacing`: The machine's own uplink as one queue
- `peers`: Sessions
- `requests`: What we asked for, from whom, and how much of it has come
- `session`: One session with one peer
"""
