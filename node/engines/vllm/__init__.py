"""vLLM as a node's engine. What runs in vLLM's own environment is the distribution in `plugin`."""
