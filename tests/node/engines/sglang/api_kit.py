"""An API server of a test's own, which answers as SGLang's, and what the driver's requests of it look like."""

import base64
import io
import json
import pickle
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from node.engines.sglang.plugin.swarm_sglang.calls import LOADER, Answer, decoded
from node.engines.vllm.plugin.swarm_vllm.messages import Generate

GOOD = {
    "version": "0.5.23", "tp_size": 2, "pp_size": 1, "dp_size": 1, "custom_weight_loader": [LOADER],
    "disable_overlap_schedule": True, "model_path": "/nowhere",
}  # fmt: skip
WITHIN_S = 20.0


class Sglang:
    """An API server that notes what it is asked. `outcome(call, rank)`: a rank's answer to a call."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.info: dict[str, Any] = dict(GOOD)
        self.outcome: Callable[[Any, int], Answer] = lambda call, rank: Answer(call.number, rank)
        self.lines: list[Any] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(200, outer.info)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append((self.path, body))
                if self.path == "/update_weights_from_tensor":
                    outer.ranks(body["serialized_named_tensors"])
                if self.path in outer.answers:
                    self.answer(*outer.answers[self.path])
                elif body.get("stream"):
                    lines = b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in outer.lines)
                    self.answer(200, lines + b"data: [DONE]\n\n")
                else:
                    self.answer(200, {"success": True})

            def answer(self, status: int, content: Any) -> None:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def ranks(self, payloads: list[str]) -> None:
        """Answer as the loaders of all ranks do."""

        class Reader(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                return bytes

        for rank, payload in enumerate(payloads):
            ((_, data),) = Reader(io.BytesIO(base64.b64decode(payload))).load()
            call = decoded(data)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(call.answer)
                sock.sendall(msgspec.msgpack.encode(self.outcome(call, rank)))

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def line(index: int, ids: list[int], finish: str | None, spans: list[tuple[str, int, int]]) -> dict[str, Any]:
    reason = None if finish is None else {"type": finish}
    versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    drawn = [[-0.5, token, None] for token in ids]
    meta = {"output_token_logprobs": drawn, "finish_reason": reason, "weight_versions": versions}
    return {"index": index, "output_ids": ids, "meta_info": meta}


def generating(n: int) -> Generate:
    return Generate(n, 1, ((5, 6), (7,)), (3, 4), 8, 0.7, 0.9, (2,))
