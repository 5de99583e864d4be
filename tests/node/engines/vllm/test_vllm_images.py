"""Images through the gateway to real vLLMs, in real processes: the answers are those of a fresh vLLM."""

import base64
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from memory_kit import generates, step

from scenarios.engines.engine_bench import SMALL
from scenarios.engines.vllm_swarm import MODEL, READY_WITHIN_S, ask, served

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]  # a vLLM of its own, for a model that reads images

TOKENS = 8


def noise(seed: int, width: int = 50, height: int = 40) -> bytes:
    """A PNG of random colours."""
    rows = np.random.default_rng(seed).integers(0, 256, (height, 3 * width), np.uint8)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def chat(port: int, images: Sequence[bytes], **more: Any) -> dict[str, Any]:
    urls = ["data:image/png;base64," + base64.b64encode(image).decode() for image in images]
    content = [{"type": "text", "text": "see "}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0,
        "logprobs": True, "ignore_eos": True,
    } | more  # fmt: skip
    answer = trio.run(ask, port, "POST", "/v1/chat/completions", body)
    head, _, text = answer.partition(b"\r\n\r\n")
    return {"status": int(head.split()[1])} | json.loads(text)


def drawn(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    assert answer["status"] == 200, answer
    (choice,) = answer["choices"]
    return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


def test_images_are_read_as_by_a_fresh_vllm(python: Path, fresh: Callable[..., Any], tmp_path: Path) -> None:
    """Also after a version that changed the encoder, and by the node that is left when the other one is killed."""
    from scenarios.engines.engine_models import make_seeing

    base = make_seeing(tmp_path / "seeing")
    newer = step(base, tmp_path / "newer", 1)
    one, two = noise(1), noise(2)
    asked = [[one], [two], [one, two]]
    with served(tmp_path / "swarm", base, 2, SMALL, python) as running:
        answers = [chat(running.gateway, images) for images in asked]
        found = [drawn(answer) for answer in answers]
        several = chat(running.gateway, [one], n=3)
        assert [choice["token_ids"][0] for choice in several["choices"]] == [found[0][0][0]] * 3
        header = noise(3)[:16] + struct.pack(">II", 16000, 16000) + noise(3)[24:]
        assert chat(running.gateway, [header])["status"] == 400
        assert chat(running.gateway, [noise(3)[:-900]])["status"] == 400, "only an engine finds that it is cut off"
        running.swarm.publish(newer, "--wait")
        for name in ("box0", "box1"):
            running.swarm.until(name, generates(1), READY_WITHIN_S)
        later = [drawn(chat(running.gateway, images)) for images in asked[:2]]
        running.swarm.kill("box0")
        left = [drawn(chat(running.gateway, images)) for images in asked[:2]]
    prompts = [answer["choices"][0]["prompt_token_ids"] for answer in answers]
    coded = [[base64.b64encode(image).decode() for image in images] for images in asked]
    before, after = fresh([base, newer], prompts, TOKENS, images=coded)
    for mine, (ids, logprobs) in zip([*found, *later, *left], [*before, *after[:2], *after[:2]], strict=True):
        assert mine[0] == ids
        np.testing.assert_array_equal(np.float32(mine[1]), np.float32(logprobs))
    assert len({tuple(logprobs) for _, logprobs in [*before, *after]}) == 6, "each image and version gives others"
