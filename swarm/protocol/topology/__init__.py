"""The trees: K of them over all members, planned from measured uplinks.

`trees` plans from nothing, `planner` moves few edges when a member joins or leaves, and `replanning` decides when a
plan is due and what it is made from. Only the authority runs these.

Modules:

- `child_slots`: How many children each node has, and in which stripes
- `planner`: The plan kept up to date
- `rates`: Estimates of members' uplinks and regions, from what their neighbours measure
- `replanning`: The authority's plan: when it is made, and from what
- `trees`: A plan from nothing
"""
