"""How tokens are drawn beyond temperature and top-p. Part of the messages; see `messages`."""

import msgspec

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of `node.engines.base.SamplingOptions` that an engine draws by; see there."""

    min_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    stop_texts: tuple[str, ...] = ()
    special: bool = False
    top_logprobs: int = 0
    """Not 0 only for a front whose `Front.tops` is true."""
    prompt_logprobs: int | None = None
    """Not None only for a front whose `Front.prompts` is true."""
    structure: str = ""
    """JSON of the fields of vLLM's `StructuredOutputsParams`, and `begun`: so many tokens at the end of the prompt are
    the beginning of the text. Not empty only for a front whose `Front.structures` is true."""
