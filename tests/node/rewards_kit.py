"""A model's folder whose tokens are single characters, and reward functions that go wrong in every way."""

from pathlib import Path

CHARACTERS = [chr(code) for code in range(32, 127)]
FUNCTIONS = """
import os, sys, time

def length(prompt, completion, metadata):
    return len(completion) + metadata.get("more", 0)

def texts(prompt, completion, metadata):
    raise ValueError(f"{prompt}|{completion}|{metadata}")

def hang(prompt, completion, metadata):
    time.sleep(60) if completion == "hang" else None
    return 1.0

def crash(prompt, completion, metadata):
    if completion == "crash":
        os._exit(3)
    return 1

def nan(prompt, completion, metadata):
    return float(completion)

def wrong(prompt, completion, metadata):
    return completion

def noisy(prompt, completion, metadata):
    print("x" * 10_000_000)
    sys.stderr.write("y" * 10_000_000)
    return 1.0

def huge(prompt, completion, metadata):
    return "z" * 50_000_000

def long_reason(prompt, completion, metadata):
    raise RuntimeError("so\\n" * 1_000_000)

def hungry(prompt, completion, metadata):
    return float(len(bytearray(8 << 30)))

def leaves(prompt, completion, metadata):
    sys.exit("no")

length.swarm_version = "3"
"""


def make_model(folder: Path) -> Path:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ids(text: str) -> tuple[int, ...]:
    return tuple(CHARACTERS.index(c) for c in text)
