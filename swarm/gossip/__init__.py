"""Small announcements to every member, over GossipSub. They are never on a step's critical path.

The data of a step goes down the trees (`swarm.protocol.transfer`). Announcements may be lost, repeated or late, and
their receivers must tolerate that.

- `announcements`: `Gossip`, one topic at one peer
"""
