"""The repair of late data: `Repair` fetches the chunks that the trees bring late or not at all, and helps neighbours.

Modules:

- `load_shedding`: Fetching late chunks from neighbours that offer them
- `offers`: Offering chunks to neighbours that want them
- `pulls`: Requesting chunks of stripes without progress
- `repair`: A member's `Repair`: the three above as one machine, which the rest of the core talks to
- `uploads`: The chunks that a peer sends on request
"""
