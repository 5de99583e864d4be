"""Coverage-guided fuzzing of every decoder of bytes from peers, with atheris (libFuzzer).

    python -m scenarios.fuzz.guided --seconds 60 [--seed 1] [--corpus DIR]

Layouts, chunk headers and manifests are decoded in Python, so their own coverage guides the fuzzer. The coders' readers
are compiled and have no coverage. A slow decoder in plain Python (`tests/codec/plain_decoder.py`) reads the same
payload and guides instead; if the compiled decoder accepts a payload, both results must be equal bit by bit. The first
byte of an input selects the decoder. Any exception but `PeerError` ends the run with a stack trace and the input.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from codec.chunk import CODER_RAW
from codec.errors import PeerError, UsageError
from scenarios.fuzz.libfuzzer import fuzz

__all__ = ["main"]

_TESTS: Final = Path(__file__).parents[2] / "tests" / "codec"
_ELEMENTS: Final = 300
_KINDS: Final = ("BF16", "F32", "F8_E4M3", "I8")


def _load_plain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_decoder", _TESTS / "plain_decoder.py")
    if spec is None or spec.loader is None or not (_TESTS / "plain_decoder.py").exists():
        raise UsageError("The plain decoder is part of the tests: run this in a checkout.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _new_values(payload: bytes, old: Any, dtype: Any) -> tuple[Any, Any]:
    """As the other coders' `decode_block`. A payload of the block's length is never one of values."""
    from codec import values

    copy = old.copy()
    values.decode_onto(payload, copy, dtype)
    return np.arange(old.size), copy


class _Targets:
    """The decoders under test. Create it once, within atheris' instrumentation."""

    def __init__(self) -> None:
        from codec import pco, rice
        from codec.bits import DTYPES
        from codec.chunk import open_header
        from codec.layout import Layout
        from codec.manifest import open_manifest
        from codec.sign import Key
        from codec.staging import warm_up

        self.key = key = Key(bytes(32))
        self.plain = _load_plain()
        for name in _KINDS:  # compiling takes longer than an input may
            warm_up(DTYPES[name])
            pco.warm_up(DTYPES[name])
        self.coders = (rice.decode_block, pco.decode_block, _new_values)
        rng = np.random.default_rng(0)
        self.old = [(name, DTYPES[name], self._weights(rng, DTYPES[name])) for name in _KINDS]
        self.parsers: tuple[Callable[[bytes], Any], ...] = (
            Layout.from_bytes,  # the following are signed here, since decoders must be safe with any signer
            lambda body: open_header(key.seal(b"swarm-node chunk 1", body), key.public),
            lambda body: open_manifest(key.seal(b"swarm-node manifest 1", body), key.public),
        )

    @staticmethod
    def _weights(rng: np.random.Generator, dtype: Any) -> Any:
        """Return bits with several exponents, so that the coders use several classes."""
        bits = rng.integers(0, 256, _ELEMENTS * dtype.itemsize, dtype=np.uint8).view(dtype.bits).astype(np.uint64)
        if dtype.exponent_shift is not None:
            low = (1 << dtype.exponent_shift) - 1
            bits = bits & low | rng.integers(2, 12, _ELEMENTS).astype(np.uint64) << dtype.exponent_shift
        return bits.astype(dtype.bits)

    def one(self, data: bytes) -> None:
        """Decode one input with the decoder that its first byte selects."""
        if not data:
            return
        choice, rest = data[0] % 16, data[1:]
        if choice < 8:
            self._coder(choice % 2, choice // 2, rest)
        elif choice < 12:
            self._coder(CODER_RAW, choice - 8, rest)
        elif choice < 15:
            try:
                self.parsers[choice - 12](rest)
            except PeerError:
                return

    def _coder(self, coder: int, kind: int, payload: bytes) -> None:
        name, dtype, old = self.old[kind]
        model = self.plain.Model([], bytes(32), [old.tolist()], [name])
        try:
            model.decode(0, coder, payload)
            expected = np.array(model.blocks[0], np.uint64)
        except (IndexError, AssertionError, ValueError):
            expected = None
        try:
            positions, bits = self.coders[coder](payload, old, dtype)
        except PeerError:
            return
        assert positions.size == bits.size > 0
        assert np.all(positions[1:] > positions[:-1])
        words = old.copy()
        words[positions] = bits
        assert expected is not None, f"{name}: only the compiled decoder accepts this"
        assert np.array_equal(words.astype(np.uint64), expected), f"{name}: the decoders differ"


def _corpus(targets: _Targets, folder: Path) -> None:
    """Write valid inputs to start from."""
    from codec import pco, rice, values
    from codec.chunk import BlockDelta, ChunkKey, seal_chunk
    from codec.manifest import Manifest

    rng = np.random.default_rng(1)
    for kind, (_, dtype, old) in enumerate(targets.old):
        for density in (0.01, 0.2, 1):
            steps = rng.integers(-3, 4, old.size) * (rng.random(old.size) < density)
            new = (old.astype(np.int64) + steps).astype(dtype.bits)
            for coder, module in enumerate((rice, pco)):
                payload = module.encode_block(old, new, dtype)
                if payload is not None:
                    (folder / f"coder{coder}-{kind}-{density}").write_bytes(bytes((kind * 2 + coder,)) + payload)
            payload = values.encode_block(old, rng.choice(new[:6], new.size), dtype)
            if payload is not None:
                (folder / f"values-{kind}-{density}").write_bytes(bytes((8 + kind,)) + payload)
    key, root = targets.key, bytes(32)
    deltas = [BlockDelta(block, block % 3, root, bytes(100)) for block in (0, 1, 7)]
    chunk = seal_chunk(ChunkKey(1, 300, 2, 0), root, root, deltas, key)
    manifest = Manifest(key.public, 0, 1, 0, root, root, root, (chunk.id,), 1000, 10).seal(key)
    signature_bytes = 64
    (folder / "layout").write_bytes(b"\x0c" + (_TESTS / "golden" / "layout").read_bytes())
    (folder / "header").write_bytes(b"\x0d" + chunk.header[signature_bytes:])
    (folder / "manifest").write_bytes(b"\x0e" + manifest[signature_bytes:])


def _load() -> tuple[Callable[[bytes], None], Callable[[Path], None]]:
    targets = _Targets()
    return targets.one, partial(_corpus, targets)


def main() -> int:
    import codec.kernels.planes
    import codec.kernels.rans
    import codec.kernels.scan  # noqa: F401  # import before instrumentation: compiled code must not be instrumented

    return fuzz(__doc__, ["codec", "plain_decoder"], _load)


if __name__ == "__main__":
    sys.exit(main())
