"""The gateway: OpenAI-compatible endpoints in front of the swarm; each request becomes request groups in the ledger.

`node.http` serves connections, `app` has the endpoints, `parsed_request` turns a body into prompts, `request_tracker`
asks the ledger, and `answers` encodes the result. `followed_answer` sends a stream while its samples are drawn.
`parameters` lists every field and what happens with it.

Modules:

- `admission`: Judges a request by its head alone
- `answers`: Encodes accepted rollouts as OpenAI's clients read them
- `app`: The endpoints
- `bodies`: Decodes the body of a request
- `choice_form`: How the tokens of a choice are written
- `clients`: The keys of clients, and their quotas
- `followed_answer`: Sends an answer while its samples are drawn
- `followed_sample`: One sample whose tokens a client gets while they are drawn
- `front`: The process that listens, and keeps the clients' requests while the seed is away
- `gateway`: The gateway as the seed runs it
- `image_parts`: The images in a chat request
- `logprob_fields`: Reads the fields that ask for log-probabilities
- `parameters`: Every field that a request may have, and what happens with it
- `parsed_request`: Turns a request body into prompts and sampling parameters
- `progress`: What of a stream its client has, as notes from which another seed goes on
- `request_tracker`: Follows each prompt of a request through the ledger
- `structure_fields`: Reads the fields that say what the text of an answer must be
- `text`: Converts between text and token ids
- `token_events`: Encodes tokens that are drawn as the events of a stream
- `tokenizing`: The endpoints /tokenize and /detokenize
- `tool_calls`: Finds a model's calls of tools in its text
- `wanted_version`: The versions that a request allows
"""

from node.gateway.gateway import Gateway

__all__ = ["Gateway"]
