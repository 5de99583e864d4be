"""What an update costs a running engine, and whether the bits are exact afterwards.

`updates` is the command; `engine_bench` drives one vLLM; `vllm_environment` makes the environment that a vLLM
on CPUs needs.

Modules:

- `engine_bench`: One vLLM under its driver, with a replica beside it that a test or a scenario moves on
- `engine_cost`: What updates cost a running engine
- `engine_fresh`: Run by vLLM's Python
- `engine_models`: Models and steps to try engines on
- `updates`: What an update costs a running vLLM, and whether what it holds afterwards is exact
- `vllm_environment`: A vLLM for CPUs in an environment of its own, for the scenarios and the tests that run one
"""
