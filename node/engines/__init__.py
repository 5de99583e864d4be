"""What generates tokens at a node: the `Engine` seam, its processes, and the transformers engine.

`base` is the seam, `host` the node's side of an engine process, `worker` the process itself. `vllm` has the
second engine.

Modules:

- `vllm/`
- `base`: The one seam between a node and whatever generates its tokens
- `cohort`: Equally long prompts that are continued together, a token at a time, by a plain loop with a KV cache
- `group`: Several engines of one node, as one
- `host`: The node's side of its engine
- `live`: The bits of a torch model's live parameters, by checkpoint name
- `load`: Loading a Hugging Face folder, for engines and trainers alike
- `messages`: What a node and its engine's process say over their Unix socket
- `sampling`: Drawing tokens from logits, with randomness that belongs to each row alone
- `texts`: The text of a continuation, token by token, and the stop texts in it
- `transformers`: The reference engine
- `widths`: A checkpoint's bits as those of a live tensor of the same or another dtype, and back
- `worker`: The engine's own process
"""
