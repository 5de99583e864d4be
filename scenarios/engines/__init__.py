"""Measures what an update costs a running engine, and checks that its weights are exact afterwards.

`updates` is the command for vLLM, `sglang_updates` the one for SGLang. `engine_bench` drives one vLLM.
`vllm_environment` creates the environment of a vLLM for CPUs.

Modules:

- `adapter_models`: Made-up adapters to test engines with
- `drafts`: Whether a draft model that is updated with its target proposes as well as a fresh one
- `engine_bench`: One vLLM under the driver of a node, with a replica that a test or scenario advances
- `engine_cost`: Measures the cost of updates in a running engine
- `engine_fresh`: Prints the answers of a fresh vLLM for each checkpoint
- `engine_models`: Small models and made-up steps to test engines with
- `memory_cost`: Measures what versions cost a node by where its replica is
- `plugins`: Installs this checkout's plugins into the environment of an engine
- `sglang_bench`: One SGLang under the driver of a node, and one that a user runs
- `sglang_environment`: Creates a separate environment with SGLang's released wheel for CPUs
- `sglang_updates`: Measures updates of a running SGLang, and checks that its weights are exact afterwards
- `updates`: Measures updates of a running vLLM, and checks that its weights are exact afterwards
- `vllm_environment`: Creates a separate environment with a vLLM for CPUs
- `vllm_swarm`: A swarm whose nodes run a vLLM each, behind its gateway
"""
