"""The limits of a model by the `config.json` of its checkpoint: how many tokens it reads, and which. Needs no torch."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from codec.errors import PeerError
from codec.unpack import unpack

__all__ = ["NO_LIMITS", "ModelLimits", "config_of", "limits_of", "number_in"]

LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""The names that model families give to the number of positions."""
_CONFIG: Final = msgspec.json.Decoder(dict[str, Any])


class ModelLimits(NamedTuple):
    """What a model can read. None: its config.json does not say."""

    context: int | None = None
    """Tokens of prompt and sample together."""
    vocabulary: int | None = None
    """Token ids are smaller than this."""

    def why_not(self, prompt: bytes, max_tokens: int) -> str | None:
        """Why the model cannot continue `prompt` (packed token ids) by `max_tokens` tokens, in a sentence; None: it
        can."""
        tokens = len(prompt) // 4
        if self.context is not None and tokens + max_tokens > self.context:
            room = self.context - tokens
            remedy = f"ask for at most {room:,}" if room > 0 else "give a shorter prompt"
            return (
                f"The model reads {self.context:,} tokens; the prompt has {tokens:,}, and max_tokens asks for "
                f"{max_tokens:,} more: {remedy}."
            )
        ids = np.frombuffer(prompt, "<u4")
        if self.vocabulary is not None and tokens and (largest := int(ids.max())) >= self.vocabulary:
            at = int(ids.argmax())
            return f"Token {at} of the prompt is {largest:,}; the model's token ids are 0 to {self.vocabulary - 1:,}."
        return None


NO_LIMITS: Final = ModelLimits()


def limits_of(files: Mapping[str, bytes]) -> ModelLimits:
    """The limits by `files`, the small files of a checkpoint by name."""
    config = config_of(files)
    text = config.get("text_config")
    inner: dict[str, Any] = text if isinstance(text, dict) else {}
    return ModelLimits(
        _context(inner) or _context(config), number_in(inner, "vocab_size") or number_in(config, "vocab_size")
    )


def config_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The config.json among `files`; empty where there is none, or no JSON object in it."""
    try:
        return unpack(_CONFIG, files.get("config.json") or b"{}", "config.json")
    except PeerError:
        return {}


def _context(config: Mapping[str, Any]) -> int | None:
    """The context in tokens; with scaled rotary positions, the larger of the configured and the scaled one."""
    length = next((found for name in LENGTHS if (found := number_in(config, name))), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if length is None or not isinstance(scaling, dict):
        return length
    factor = scaling.get("factor")
    original = number_in(scaling, "original_max_position_embeddings") or length
    return max(length, int(original * factor)) if isinstance(factor, int | float) else length


def number_in(config: Mapping[str, Any], name: str) -> int | None:
    """The positive integer under this name; None: there is none."""
    found = config.get(name)
    return found if isinstance(found, int) and found is not True and found > 0 else None
