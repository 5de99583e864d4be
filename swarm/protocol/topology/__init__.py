"""Who feeds whom: K trees over the members, planned from their measured rates.

`trees` plans from nothing, `planner` changes few edges when a member comes or goes, and `replanning` says when
which of them is due. The authority alone runs these.

Modules:

- `child_slots`: How many children each node feeds, and in which stripes
- `planner`: The plan kept up to date
- `rates`: What members' uplinks are worth, as their receivers say
- `replanning`: Who stands where, as the authority decides it
- `trees`: Trees grown from seats
"""
