"""Who belongs to the swarm: tickets, joins, leases and their renewal, the roster.

Membership is a lease that the authority signs; both ends keep their own view of it.
`docs/leases.md` specifies the documents and times.

Modules:

- `admission`: Who comes in and who goes
- `enrolment`: What the authority knows of a member beside its lease
- `entitlement`: Which children may take our uplink at once
- `greeting`: What neighbours say to one another without being asked, and of the roster when they are
- `heartbeats`: The authority's heartbeats
- `lease`: Membership is a lease
- `membership`: A member among members
- `quota`: How much each peer fetched while catching up, for the quota of its ticket
- `renewals`: A member's renewals
- `report_limits`: How many reports a neighbour may have the authority or a member verify
- `roster`: The roster
- `rosterbook`: The roster as one peer holds it
- `session`: Who we are connected to, and whom we try to reach
- `succession`: How a swarm gets a new key
- `tickets`: What each ticket has been used for
"""
