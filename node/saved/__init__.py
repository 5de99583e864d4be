"""Saved states: the trainer's state (its optimizer's, for example) as encrypted fragments on the swarm's nodes.

The trainer hands a state to its seed, which encrypts it, codes it into n fragments of which any k give it back, signs a
record of them, and places each fragment with another node. A machine that has the swarm's key fetches it back from the
nodes when the seed is gone. A seed that takes over adopts it: it looks after the fragments from then on.

In reading order:

- `record`: the signed description of a saved state, and the sizes that follow from it. Pure
- `cipher`: encrypts and decrypts the rows of a state. Pure
- `coding`: a file to fragments on disk, and back
- `placement`: decides which node is to hold which fragment. Pure
- `messages`: what a holder is asked, and its answers
- `conversation`: one stream between a holder and the process that asks it
- `folder`: the fragments on a node's disk
- `holder`: the node's end
- `placer`: the seed's end
- `sources`, `fetching`: the end of the machine that fetches: from which nodes, and the fragments of a state
- `adopting`: brings the newest state to a seed that does not have it on its disk
- `weights`: the weights of the newest version that the nodes hold, by the same streams
- `rescue`: a state and the weights, into files
"""
