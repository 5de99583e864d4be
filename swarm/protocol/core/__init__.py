"""The core's vocabulary: events and effects, messages, signed documents, tuning, state.

Every other room of the protocol imports from here; nothing here imports from those. What travels between peers
is declared here (`wire`, `documents`), with its size limits.

Modules:

- `boots`: Boot numbers of an authority
- `bucket`: A token bucket
- `documents`: The signed documents of membership, as they travel
- `events`: The core's vocabulary: events and effects
- `notices`: What the core tells the application
- `outbox`: The effects of the event that is being applied
- `reach`: Who can dial whom, and who does
- `standing`: Where a lease stands
- `tuning`: The numbers that the protocol runs by and a preset may change, each with its reason
- `uplink`: Our uplink, as far as the core knows it
- `version`: A policy version's number
- `wire`: Messages <-> bytes
"""
