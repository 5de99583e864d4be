"""vLLM as a node's engine: a driver process here, and a plugin in vLLM's own processes.

The driver imports neither torch nor vLLM. `plugin/` is a distribution of its own, installed into vLLM's environment;
both sides import its `messages`.

Modules:

- `plugin/`
- `adapters`: The adapters of one vLLM
- `agreement`: Whether a vLLM with a draft model draws what it says
- `attached`: What a driver knows of its vLLM
- `causes`: Why a vLLM ended before it served, in a sentence for the user
- `classes`: Which tensors are scattered into live weights, and which are loaded with their modules
- `compatibility`: Whether a vLLM serves the swarm's model
- `engine`: The driver of one vLLM
- `flights`: The generations and scorings that run in a vLLM
- `invariance`: Whether a vLLM rounds a row alike in any batch
- `installed`: What an environment has of vLLM
- `launch`: Where a driver's vLLM comes from
- `links`: The driver's connections to a vLLM
- `measured`: What a vLLM can do, known once it holds a model
- `proof`: Compares an engine's live bits with the hashes that they must have
- `server`: vLLM's process
- `speculation`: How a vLLM is told to propose tokens by a draft model
- `worker`: vLLM's driver as an engine process
"""
