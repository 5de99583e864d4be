"""SGLang as a node's engine.

vLLM's driver drives it: `front` speaks the driver's messages on SGLang's behalf, and the plugin's ranks speak them
themselves.

Modules:

- `plugin/`
- `engine`: The driver
- `front`: Speaks for SGLang's API server
- `generating`: A flight of completions, asked of SGLang
- `http`: Requests to SGLang's API server
- `installed`: What an environment has of SGLang and the plugin
- `judging`: Tokens that were drawn before, scored or replayed
- `launch`: Where a driver's SGLang comes from
- `server`: SGLang's process
- `worker`: The driver's process
"""
