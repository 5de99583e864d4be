"""The gateway: OpenAI-compatible endpoints in front of the swarm; each request becomes request groups in the ledger.

`node.http` serves connections, `app` has the endpoints, `parsed_request` turns a body into prompts, `request_tracker`
asks the ledger, and `answers` encodes the result. `parameters` lists every field and what happens with it.

Modules:

- `answers`: Encodes accepted rollouts as OpenAI's clients read them
- `app`: The endpoints
- `gateway`: The gateway as the seed runs it
- `parameters`: Every field that a request may have, and what happens with it
- `parsed_request`: Turns a request body into prompts and sampling parameters
- `request_tracker`: Follows each prompt of a request through the ledger
- `text`: Converts between text and token ids
"""

from node.gateway.gateway import Gateway

__all__ = ["Gateway"]
