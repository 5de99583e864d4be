"""An OpenAI-compatible endpoint in front of the swarm: a request is a work lease like any other.

`app` has the endpoints, `http` the server, `parsed_request` a request's meaning, `request_tracker` its way
through the ledger. `parameters` lists every field and what happens with it.

Modules:

- `answers`: Accepted samples as OpenAI's clients read them
- `app`: The endpoints
- `bodies`: Byte budgets that all clients of the gateway share
- `gateway`: The gateway as its seed runs it
- `http`: HTTP/1.1 on trio over h11, for a few JSON endpoints
- `parameters`: Every field that a request may have, and what happens with it
- `parsed_request`: What a client asks for, in OpenAI's words and vLLM's, understood
- `request_tracker`: Requests over the counter
- `strangers`: Connections that have not yet said anything valid
- `text`: Between text and token ids, as the base checkpoint says
"""

from node.gateway.gateway import Gateway

__all__ = ["Gateway"]
