"""The gateway: OpenAI-compatible endpoints in front of the swarm; each request becomes request groups in the ledger.

`http` serves connections, `app` has the endpoints, `parsed_request` turns a body into prompts, `request_tracker` asks
the ledger, and `answers` encodes the result. `parameters` lists every field and what happens with it.

Modules:

- `answers`: Encodes accepted rollouts as OpenAI's clients read them
- `app`: The endpoints
- `connection`: One client's HTTP/1.1 connection over h11
- `gateway`: The gateway as the seed runs it
- `http`: An HTTP/1.1 server for a few JSON endpoints, which bounds what clients may cost
- `http_messages`: The HTTP vocabulary: limits, request heads, requests, responses, errors
- `memory_budget`: Memory budgets that all clients share
- `parameters`: Every field that a request may have, and what happens with it
- `parsed_request`: Turns a request body into prompts and sampling parameters
- `request_tracker`: Follows each prompt of a request through the ledger
- `strangers`: Connections that have not sent a valid head yet
- `text`: Converts between text and token ids
"""

from node.gateway.gateway import Gateway

__all__ = ["Gateway"]
