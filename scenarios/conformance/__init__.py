"""Conformance: what the swarm publishes against what transformers and peft themselves make of the same model."""
