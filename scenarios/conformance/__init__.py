"""Compares what the swarm publishes with what transformers, peft and vLLM themselves make of the same model."""
