"""Images for the gateway's tests, made without a library, and an engine that "reads" them."""

import base64
import json
import struct
import zlib
from typing import Any

from gateway_kit import END, UNKNOWN, EchoEngine, base_files
from tokenizers import Tokenizer

from node.engines.base import ABILITIES, IMAGES, JUDGES, STRUCTURES, TOP_LOGPROBS, Completion, Span
from node.engines.images import digest_of

MARK = UNKNOWN + 1
"""The token that marks the place of an image."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def png(width: int = 2, height: int = 2, shade: int = 0) -> bytes:
    """A grey image; its data is that of 2 x 2 pixels, whatever its header says."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes([0, shade, shade] * 2))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def url_of(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see "}, *parts]}]


def image_files() -> dict[str, bytes]:
    """As `base_files`, of a model that reads images."""
    files = base_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.add_special_tokens(["<image>"])
    assert tokenizer.token_to_id("<image>") == MARK
    config = {"max_position_embeddings": 128, "vision_config": {}, "image_token_id": MARK}
    return files | {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}).encode(),
        "config.json": json.dumps(config).encode(),
    }


def shown(images: tuple[bytes, ...]) -> tuple[int, ...]:
    """What `SeeingEngine` draws of these images: a letter of each one's digest."""
    return tuple(digest_of(image)[0] % 26 for image in images)


class SeeingEngine(EchoEngine):
    """Draws a letter for each image of its prompt, and ends."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__(seconds)
        self.abilities = ABILITIES - {JUDGES, STRUCTURES, TOP_LOGPROBS}
        assert IMAGES in self.abilities
        self.seen: list[tuple[bytes, ...]] = []

    async def generate(self, prompts, sampling, counts=None, adapter="", draws=None):
        found = []
        for prompt in prompts:
            self.seen.append(prompt.images)
            ids = (*shown(prompt.images), END)
            found.append(Completion(ids, (-0.25,) * len(ids), "stop", (Span(self.version, 0, len(ids)),)))
        return found, self.seconds
