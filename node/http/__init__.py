"""An HTTP/1.1 server for a few endpoints on trio, used by the gateway, the monitor and prime-rl's adapter.

`server` serves connections with a handler and bounds what clients may cost; `messages` has requests and responses.

Modules:

- `connection`: One client's HTTP/1.1 connection over h11
- `memory_budget`: Memory budgets that all clients share
- `messages`: The vocabulary: limits, request heads, requests, responses, errors
- `server`: Accepts connections and answers their requests
- `strangers`: Connections that have not sent a valid head yet
"""

from node.http.messages import (
    Check,
    CutShort,
    Handler,
    HttpLimits,
    Request,
    RequestHead,
    Response,
    Send,
    Streaming,
    failure,
    json_response,
)
from node.http.server import HttpServer, serve

__all__ = [
    "Check",
    "CutShort",
    "Handler",
    "HttpLimits",
    "HttpServer",
    "Request",
    "RequestHead",
    "Response",
    "Send",
    "Streaming",
    "failure",
    "json_response",
    "serve",
]
