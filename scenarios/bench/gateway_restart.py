"""Requests in flight at the gateway while two of four nodes are killed, and the seed is killed and started again.

    python -m scenarios.bench.gateway_restart --requests 1024 --tokens 32

All processes are real, with a random model of 100,000 parameters on transformers. Half of the requests are streams.
The two nodes and the seed are killed when the clients have a fifth, two fifths and three fifths of all tokens of the
streams. Each request must be answered once, with exactly the tokens that one engine draws without a swarm; and the text
of a stream's events must be the text of those tokens. The exit code is 1 otherwise.
"""

import json
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, swarm_in

__all__ = ["main", "measure"]

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
NODES: Final = ("one", "two", "three", "four")
ANSWER_WITHIN_S: Final = 900.0


@dataclass
class Outcome:
    """What the clients got. `tokens`, `texts`: by request. `streamed`: tokens of streams so far."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    twice: int = 0
    streamed: int = 0
    seed_killed_at: int = 0
    """Tokens of streams that the clients had when the seed was killed."""
    seconds: float = 0.0


def prompt_of(i: int) -> list[int]:
    """Five letters, others for each of the first thousands of requests."""
    return [(i // 26**k) % 26 for k in range(3)] + [i % 7, i % 11]


def make_base(folder: Path) -> None:
    """A random Qwen3 that reads and writes letters, with its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    recipe = TinyRecipe(vocabulary=len(LETTERS), hidden=64, inner=128, layers=2, seed=1)
    more = {"max_position_embeddings": 256, "initializer_range": 0.3, "eos_token_id": None}
    save_bf16(random_model(recipe, tied=False, **more), folder)
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def alone(base: Path, requests: int, tokens: int) -> dict[int, list[int]]:
    """The greedy answers of one engine in this process."""
    import torch

    from node.engines.base import Prompt, SamplingParams
    from node.engines.transformers import TransformersEngine

    torch.set_num_threads(1)
    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(base)
    found = engine.generate(
        [Prompt(tuple(prompt_of(i))) for i in range(requests)], SamplingParams(tokens, temperature=0.0)
    )
    return {i: list(completion.token_ids) for i, completion in enumerate(found)}


def measure(folder: Path, requests: int, tokens: int) -> tuple[Outcome, dict[int, list[int]]]:
    """(what the clients got, what they should get)."""
    base = folder / "base"
    make_base(base)
    wanted = alone(base, requests, tokens)
    with swarm_in(folder / "swarm") as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", str(len(NODES)))
        for name in NODES:
            swarm.start(name, "join", ticket, "--model", str(base), "--threads", "1", *LOOPBACK)
        home = {"SWARM_HOME": str(swarm.home("seed"))}
        most = ("--in-flight", str(max(1024, requests)))
        swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--json", *most, **home)
        swarm.until(
            "seed",
            lambda state: sum(node["capacity"] > 0 for node in state["work"]["nodes"].values()) == len(NODES),
            within_s=STARTED_WITHIN_S,
        )
        url = json.loads(swarm.log("gateway"))["url"]
        outcome = Outcome()

        def kill(name: str) -> None:
            swarm.signal(name, signal.SIGKILL)
            if name == "seed":
                outcome.seed_killed_at = outcome.streamed
                swarm.seed(base)

        began = time.monotonic()
        trio.run(_ask_all, url, requests, tokens, outcome, kill)
        outcome.seconds = time.monotonic() - began
        return outcome, wanted


async def _ask_all(url: str, requests: int, tokens: int, outcome: Outcome, kill: Any) -> None:
    host, port = url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
    deaths = ["three", "seed", "four"]
    all_streamed = (requests // 2) * tokens

    async def ask(i: int) -> None:
        body = {"prompt": prompt_of(i), "max_tokens": tokens, "temperature": 0, "stream": i % 2 == 0}
        data = json.dumps(body | {"ignore_eos": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        got, text, ended = [], "", False
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            rest = b""
            async for part in stream:
                *lines, rest = (rest + part).split(b"\n")
                if i % 2:
                    rest = b"\n".join([*lines, rest])
                    continue
                for line in lines:
                    if line.startswith(b"data: [DONE]"):
                        outcome.twice += ended
                        ended = True
                    elif line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise ValueError(event["error"]["message"])
                        (choice,) = event["choices"]
                        got += choice["token_ids"]
                        text += choice["text"]
                        outcome.streamed += len(choice["token_ids"])
        if i % 2:
            answer = json.loads(rest.partition(b"\r\n\r\n")[2])
            if "error" in answer:
                raise ValueError(answer["error"]["message"])
            (choice,) = answer["choices"]
            got, text, ended = choice["token_ids"], choice["text"], True
        if not ended:
            raise ValueError("the stream has no end")
        outcome.twice += i in outcome.tokens
        outcome.tokens[i], outcome.texts[i] = got, text

    async def ask_and_note(i: int) -> None:
        try:
            await ask(i)
        except (ValueError, OSError, trio.BrokenResourceError) as error:
            outcome.errors.append(f"request {i}: {error}")

    with trio.fail_after(ANSWER_WITHIN_S):
        async with trio.open_nursery() as nursery:
            for i in range(requests):
                nursery.start_soon(ask_and_note, i)
            for number, name in enumerate(deaths, 1):
                while outcome.streamed < all_streamed * number / (len(deaths) + 2):
                    if len(nursery.child_tasks) == 0:
                        return
                    await trio.sleep(0.02)
                await trio.to_thread.run_sync(kill, name)


def main() -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--requests", type=int, default=1024, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome, wanted = measure(Path(folder), options.requests, options.tokens)
    texts = {i: "".join(LETTERS[token] for token in tokens) for i, tokens in wanted.items()}
    row = {
        "requests": options.requests,
        "answered": len(outcome.tokens),
        "answered_twice": outcome.twice,
        "other_tokens": sum(outcome.tokens[i] != wanted[i] for i in outcome.tokens),
        "other_texts": sum(outcome.texts[i] != texts[i] for i in outcome.texts),
        "streamed_when_the_seed_was_killed": outcome.seed_killed_at,
        "seconds": round(outcome.seconds, 1),
        "errors": outcome.errors[:8],
    }
    if options.json:
        print(json.dumps(row))
    else:
        print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in row.items()))
    wrong = row["answered_twice"] or row["other_tokens"] or row["other_texts"] or row["errors"]
    return 1 if wrong or row["answered"] != options.requests or not outcome.seed_killed_at else 0


if __name__ == "__main__":
    run_as_program(main)
