"""Decides from numbers whether a rollout is what its node claims. Pure: numpy and hashes, no torch, no IO, no clock.

- `noise`: Gumbel noise for (seed, stream, position, token), bit-equal on every platform
- `draws`: Tokens as the argmax of log-probability plus noise, and the margin by which a claimed token loses
- `slopes`: The version test: were these log-probabilities computed by this version, or by another one?
- `opinions`: The numbers that one check yields, of an author's claims and of other checkers
- `replays`: What replays of one sample say of its author and of its checkers: mismatches, bit for bit
- `mismatches`: An anytime-valid test of mismatches: has this node more of them than the others of its class?
- `nulls`: What honest numbers are like, learned from the traffic for each context and node
- `record`: What is held against one node, over its whole life
- `evidence`: An anytime-valid test over all checks of a node, with a null that is learned from honest traffic
- `assignment`: Which rollouts are checked, and by whom, from a nonce that is older than them and that no node knows
- `classes`: Arithmetic classes: which engines round alike

Engines draw by `noise` where the sampling asks for it (`SamplingOptions.portable`), and the ledger checks by the rest
(`node.ledger.trust.verifier`). docs/verification.md has the statistics.
"""
