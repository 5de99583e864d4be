"""Small announcements to every member on a topic, over GossipSub. Never on a step's critical path.

What a step needs goes down the trees (`swarm.protocol.transfer`). Announcements may be lost, repeated or late;
whoever reads them must do with that.

Modules:

- `announcements`: Small announcements to everybody on a topic
"""
