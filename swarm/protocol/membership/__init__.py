"""Membership: tickets, joins, leases and their renewal, the roster.

Membership is a lease that the authority signs; the authority and the member each keep their own view of it.
`docs/leases.md` specifies the documents and times.

- `admission`: The authority's part: joins, returning members, kicks and quotas
- `enrolment`: What the authority knows of a member besides its lease
- `entitlement`: Which children may take our uplink at once
- `greeting`: Greetings and news between neighbours, and answers to requests for the roster
- `heartbeats`: The authority's heartbeats
- `lease`: The views that the authority and a member have of leases
- `lease_end`: Whether a lease is over, by what a member knows
- `membership`: A member's part: joining, parents, reports and leaving
- `quota`: How many bytes each peer fetched while catching up, for the quota of its ticket
- `renewals`: A member's reports, which renew its lease
- `report_limits`: How many reports a neighbour may have the authority or a member verify
- `roster`: The signed roster, and the changes between rosters
- `rosterbook`: The newest roster that a peer holds, and how it gets the next
- `session`: Open sessions, and dials with their back-off
- `succession`: How a swarm gets a new key
- `surplus`: Which sessions a peer closes because it has no use for them
- `tickets`: What each ticket has been used for
"""
