"""The core's vocabulary: events and effects, messages, signed documents, tuning, state.

Every other room of the protocol imports from here; nothing here imports from those. What travels between peers
is declared here (`wire`, `documents`), with its size limits.

Modules:

- `boots`: Boot numbers of an authority
- `bucket`: A token bucket
- `documents`: The documents that membership hangs on, as they are signed and travel
- `events`: The core's vocabulary
- `reach`: Who can dial whom, and who does
- `tuning`: The numbers that the protocol runs by and a preset may change, each with its reason
- `uplink`: Our uplink, as far as the core knows it
- `wire`: Messages <-> bytes
"""
