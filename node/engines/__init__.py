"""The engines of a node: what generates tokens, in processes of its own.

`interface` defines an engine, `host` is the node's side of an engine process, and `worker` is that process. The engines
are `transformers`, `vllm` and `sglang`.

Modules:

- `sglang/`
- `vllm/`
- `adapters`: Adapters (LoRA) as a node gives them to its engines
- `answer_checks`: Why an engine's answer cannot be one to what it was asked
- `arithmetic`: The name that an engine gives its arithmetic class
- `base`: The values that a node and its engines exchange
- `cohort`: Equally long prompts that are continued together, a token at a time
- `constraints`: Keeps the rows of a cohort to what a structure allows
- `device`: The device on which torch computes, by the name that a user gave
- `device_plan`: Which devices of a machine each engine of a node gets
- `devices`: Finds the devices of this machine, and plans which of them each engine gets
- `forced`: Replays: claimed tokens judged by the computation that draws tokens
- `generation`: How an engine process generates, for each style of engine
- `group`: Several engines of one node, used as one
- `held_adapters`: The adapters that a node wants its engine to serve
- `host`: The node's side of its engine
- `images`: The images of a prompt: limits, digests, and what their headers say
- `interface`: The interface between a node's engine process and the engine in it
- `invariance`: Whether a row's bits depend on the batch beside it
- `judgement`: What an engine finds out about tokens that another node says it drew
- `link`: One connection of the node to an engine process
- `live`: The bits of a torch model's live parameters, by checkpoint name
- `load`: Loads a Hugging Face folder, for engines and trainers
- `lora`: Adapters in a transformers model
- `messages`: The messages between a node and its engine's process
- `process`: The engine's process, started and killed by the node
- `prompt_scores`: How likely a model finds the tokens of a prompt
- `replay`: Draws a sample again, token by token
- `replica_ref`: A node's replica as its engine host is told of it
- `room`: How much an inference server computes at a time, as it says itself
- `rows`: The texts of a batch's rows, read by the model a token at a time
- `sampling`: Drawing tokens from logits
- `server_process`: The process of an inference server that an engine's driver starts
- `server_specs`: The driver processes of a node's inference servers
- `structures`: What the text of a completion must be
- `texts`: The text of a continuation, and the stop texts in it
- `top_logprobs`: The likeliest tokens of each draw with their log-probabilities
- `transformers`: The reference engine
- `undo`: The bits that the last commit replaced
- `visible_gpus`: The GPUs that engines of this machine may use
- `widths`: Converts a checkpoint's bits to those of a live tensor of another dtype, and back
- `window`: The shared memory through which a node reads blocks back out of its engine
- `worker`: The engine's own process
"""
