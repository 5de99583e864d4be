"""Every field that a request may have, and what happens with it: the parser, the documentation and the tests all use
this list.

A field is *done* (it has its effect), *refused* (400, with the field's name in `error.param`) or *harmless* (accepted,
because the tokens of an answer do not depend on it). A field without a row is refused, too. `markdown` makes the table
of docs/parameters.md.
"""
# ruff: noqa: E501 - a row is a line

from typing import Annotated, Any, Final, Literal

import msgspec

__all__ = ["ENDPOINTS", "PARAMETERS", "BadRequest", "Parameter", "markdown"]

C: Final = "completions"
H: Final = "chat"
G: Final = "generate"
S: Final = "sampling_params"
ENDPOINTS: Final = {
    C: "/v1/completions",
    H: "/v1/chat/completions",
    G: "/inference/v1/generate",
    S: "`sampling_params` of /inference/v1/generate",
}

Happens = Literal["done", "refused", "harmless"]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BadRequest(ValueError):
    """The client can correct the request; the message says how. `param`: the wrong field, if it is a single one."""

    def __init__(self, why: str, param: str | None = None) -> None:
        super().__init__(why)
        self.param = param


class Parameter(msgspec.Struct, frozen=True):
    """A field of the endpoints in `on`."""

    name: str
    happens: Happens
    on: tuple[str, ...]
    says: str
    """The text of the table; for a refused field also the end of the error."""
    kind: Any = Any
    """Its type."""
    nothing: tuple[Any, ...] = ()
    """Values, besides null, that ask for nothing: they are accepted although the field is refused."""
    example: Any = None
    """A value that asks for something."""


def _done(name: str, kind: Any, on: tuple[str, ...], says: str, example: Any = None) -> Parameter:
    return Parameter(name, "done", on, says, kind, example=example)


def _harmless(name: str, on: tuple[str, ...], says: str, example: Any, kind: Any = Any) -> Parameter:
    return Parameter(name, "harmless", on, says, kind, example=example)


def _refused(name: str, on: tuple[str, ...], says: str, example: Any, *nothing: Any) -> Parameter:
    return Parameter(name, "refused", on, says, Any, nothing, example)


_TEXTS = str | list[str]
_ONE_LOGPROB = "Only the log-probabilities of the sampled and the likeliest tokens are known."
_FORMATS = "Use `structured_outputs`."
_REASONING = "Reasoning is not separated from the rest of an answer."
_ONLY_TEXT = "Answers are text."
_IMAGES = "[Images](#images) are read as the model's own processor reads them."
_TOKENS_ALONE = "Only tokens are read."
_BEAMS = "There is no beam search."

_SAMPLING: Final = (
    _done(
        "max_tokens",
        int,
        (C, H, S),
        "The most tokens of an answer; with `echo` also 0, for the prompt alone. Default: 16 for completions; otherwise as many as the model can read after the prompt, or 4,096 where its config.json does not say how many it reads.",
        3,
    ),
    _done("max_completion_tokens", int, (H,), "The newer name of `max_tokens`. Both with different values: 400.", 3),
    _done(
        "temperature",
        float,
        (C, H, S),
        "0 (greedy), or 0.01 to 100; vLLM engines accept at most 2. Default: 1.",
        0.0,
    ),
    _done("top_p", float, (C, H, S), "As vLLM.", 0.5),
    _done("top_k", int, (C, H, S), "As vLLM; 0 and -1: all tokens.", 1),
    _done("min_p", float, (C, H, S), "As vLLM.", 0.9),
    _done("presence_penalty", float, (C, H, S), "-2 to 2, as OpenAI.", 2.0),
    _done("frequency_penalty", float, (C, H, S), "-2 to 2, as OpenAI.", 2.0),
    _done("repetition_penalty", float, (C, H, S), "As vLLM: the prompt's tokens count, too.", 5.0),
    _done(
        "logit_bias",
        dict[str, float],
        (C, H, S),
        "Maps token ids to values from -100 to 100; at most 1,024 tokens.",
        {"1": 100},
    ),
    _done(
        "allowed_token_ids",
        list[Token],
        (C, H, S),
        "Only these tokens, at most 4,096, are sampled. This holds for the model's end token, too.",
        [1],
    ),
    _done(
        "bad_words",
        list[str],
        (C, H, S),
        "As vLLM: the tokens of each word, with and without a space before it, are not sampled in this order. The same text may be sampled as other tokens.",
        ["a"],
    ),
    _done(
        "seed",
        int,
        (C, H, S),
        "The same request with the same seed on the same version gives the same tokens, whatever else runs: see above.",
        7,
    ),
    _done("n", int, (C, H, S), "Samples of each prompt; at most 256 in one request.", 2),
    _refused("best_of", (C,), "Samples are not ranked. The value of `n` is accepted.", 3, 1),
    _done(
        "stop",
        _TEXTS,
        (C, H, S),
        "At most 16 texts. The engine samples no token after the one that completes one of them. The answer ends before the stop text; its `usage` includes the tokens of the stop text.",
        "a",
    ),
    _done(
        "stop_token_ids",
        list[Token],
        (C, H, S),
        "The answer ends with one of these, besides the model's end tokens.",
        [1],
    ),
    _done("ignore_eos", bool, (C, H, S), "The model's end tokens do not end the answer.", True),
    _done("min_tokens", int, (C, H, S), "The answer does not end before this many tokens.", 3),
    _done(
        "include_stop_str_in_output",
        bool,
        (C, H),
        "The answer includes the stop text or stop token.",
        True,
    ),
    _harmless(
        "include_stop_str_in_output",
        (S,),
        "The answer has no text; its tokens include those of the stop text.",
        True,
        bool,
    ),
    _done(
        "skip_special_tokens",
        bool,
        (C, H, S),
        "False: the text includes special tokens, also where stop texts are searched in it.",
        False,
    ),
    _refused(
        "spaces_between_special_tokens", (C, H), "Special tokens are decoded as the tokenizer joins them.", False, True
    ),
    _harmless("spaces_between_special_tokens", (S,), "The answer has no text.", False, bool),
    _refused("use_beam_search", (C, H), _BEAMS, True, False),
    _refused("length_penalty", (C, H), _BEAMS, 2.0, 1.0),
    _refused("watermarking", (C, H, S), "Tokens are not watermarked.", True, False),
    _refused("typical_p", (C, H, S), "No engine here implements it.", 0.5, 1.0),
    _refused(
        "repetition_detection",
        (C, H, S),
        "An answer does not end because its tokens repeat.",
        {"max_pattern_size": 4, "min_count": 3},
    ),
    _refused("thinking_token_budget", (C, H, S), "Tokens of reasoning are not counted separately.", 8, -1),
    _done(
        "prompt_logprobs",
        int,
        (C, H, S),
        "As vLLM: how likely the model finds each [token of the prompt](#log-probabilities-of-prompts), and so many of the likeliest tokens in its place; at most 20. In a stream: 400.",
        1,
    ),
    _refused("logprob_token_ids", (C, H, S), _ONE_LOGPROB, [1]),
    _done(
        "response_format",
        dict[str, Any],
        (C, H),
        "`text`, `json_object`, or `json_schema`: the [structure](#structures) of the text.",
        {"type": "json_object"},
    ),
    _done(
        "structured_outputs",
        dict[str, Any],
        (C, H, S),
        "One of `json` (a schema), `json_object`, `regex`, `choice` and `grammar`: the [structure](#structures) of the text. Others: 400.",
        {"choice": ["a", "b"]},
    ),
    *(
        _refused(f"guided_{what}", (C, H, S), _FORMATS, "a")
        for what in ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")
    ),
    _refused("vllm_xargs", (C, H), "No extension reads it.", {"a": 1}, {}),
)

_PROMPT: Final = (
    _done(
        "model",
        str,
        (C, H, G),
        "The base (`--model-name`), or the name of an [adapter](adapters.md#at-the-gateway). Another: 404. Empty: the base.",
    ),
    _done("prompt", str | list[int | str | list[int]], (C,), "A text, token ids, or a list of up to 256 of either."),
    _refused("prompt_embeds", (C,), _TOKENS_ALONE, "AAAA"),
    _done(
        "messages",
        list[dict[str, Any]],
        (H,),
        "Rendered by the base checkpoint's chat template. Parts may be texts and [images](#images) (`image_url`). Others: 400.",
    ),
    _done(
        "add_special_tokens",
        bool,
        (C, H),
        "Whether the tokenizer adds its special tokens to a text. Default: true for completions; false for chat, where the template adds them.",
        False,
    ),
    _done(
        "truncate_prompt_tokens",
        int,
        (C, H),
        "The number of tokens of a prompt that are kept; -1: as many as leave room for `max_tokens`.",
        1,
    ),
    _done("truncation_side", Literal["left", "right"], (C, H), "The side that is cut off. Default: left.", "right"),
    _done(
        "echo",
        bool,
        (C,),
        "The text begins with the prompt, and `logprobs` with those of [its tokens](#log-probabilities-of-prompts).",
        True,
    ),
    _done("echo", bool, (H,), "As vLLM: the message begins with the last one given, if that is the assistant's.", True),
    _refused("suffix", (C,), "Texts are continued, not filled in.", "b", ""),
    _done(
        "add_generation_prompt",
        bool,
        (H,),
        "A variable for the template. Default: true; false with `continue_final_message`.",
        False,
    ),
    _done("continue_final_message", bool, (H,), "The last message is not ended, and the answer continues it.", True),
    _refused(
        "chat_template",
        (H,),
        "A template is a program, and this gateway runs only that of the base checkpoint. Render the text yourself and send it to /v1/completions.",
        "{{ messages }}",
    ),
    _done(
        "chat_template_kwargs",
        dict[str, Any],
        (H,),
        "Variables for the template. A variable that it does not read: 400.",
        {"thinking": True},
    ),
    _done(
        "reasoning_effort",
        str,
        (H,),
        "A variable of that name for the template. A template that does not read it: 400.",
        "high",
    ),
    _done(
        "documents",
        list[dict[str, Any]],
        (H,),
        "A variable of that name for the template. A template that does not read it: 400.",
        [{"text": "a"}],
    ),
    _done(
        "tools",
        list[dict[str, Any]],
        (H,),
        "A variable of that name for the template. [Calls](#tool-calls) are found in the answer. A template that does not read it: 400.",
        [{"type": "function", "function": {"name": "f"}}],
    ),
    _done(
        "tool_choice",
        Any,
        (H,),
        "`auto`: the model decides. `none`: the template gets no tools. `required`, or the function of one tool: the text is [calls](#structures) and nothing else.",
        "none",
    ),
    _done(
        "parallel_tool_calls",
        bool,
        (H,),
        "False: an answer has at most one [call](#tool-calls). If the model writes several, it is the first one, as in vLLM.",
        False,
    ),
    _refused("functions", (H,), "Use `tools`.", [{"name": "f"}], []),
    _refused("function_call", (H,), "Use `tools`.", {"name": "f"}, "none", "auto"),
    _refused("modalities", (H,), _ONLY_TEXT, ["text", "audio"], ["text"]),
    _refused("audio", (H,), _ONLY_TEXT, {"voice": "a", "format": "wav"}),
    _refused("media_io_kwargs", (H,), _IMAGES, {"image": {}}, {}),
    _refused("mm_processor_kwargs", (H,), _IMAGES, {"a": 1}, {}),
    _refused("mm_payload", (C, H), "Requests are not rendered for others here.", "none", "tensors"),
    _refused("return_mm_kwargs", (C, H), "Requests are not rendered for others here.", True, False),
    _refused(
        "prediction", (H,), "Engines do not use it for speculative decoding.", {"type": "content", "content": "a"}
    ),
    _refused("web_search_options", (H,), "Nothing is searched.", {}),
    _refused("moderation", (H,), "Nothing is moderated.", {"model": "a"}),
    _refused("verbosity", (H,), "Nothing can make the model more or less verbose.", "low", "medium"),
    _done("token_ids", list[int], (G,), "The prompt."),
    _done("sampling_params", Any, (G,), "See the rows of `sampling_params`."),
    _harmless("token_offsets", (G,), "Only the prompt's tokens are read.", [[0, 1]]),
    _refused("features", (G,), _TOKENS_ALONE, {"mm_hashes": {}}, {}),
    _refused("content_parts", (G,), _TOKENS_ALONE, [{"type": "text", "text": "a"}], []),
    _refused("reasoning_ended", (G,), _REASONING, True, False),
    _refused("reasoning_parser_kwargs", (G,), _REASONING, {"chat_template_kwargs": {}}),
)

_ANSWER: Final = (
    _done(
        "logprobs",
        int,
        (C,),
        "The log-probability of each sampled token, and of so many of the [likeliest tokens](#log-probabilities) beside it; at most 20.",
        0,
    ),
    _done("logprobs", bool, (H,), "The log-probability of each sampled token.", True),
    _done(
        "logprobs",
        int,
        (S,),
        "The log-probability of each sampled token, which every answer has. 2 to 20: also those of so many of the likeliest tokens, in `top_logprobs`.",
        1,
    ),
    _done(
        "top_logprobs",
        int,
        (H,),
        "So many of the [likeliest tokens](#log-probabilities) of each draw, at most 20. Needs `logprobs`.",
        2,
    ),
    _done("return_tokens_as_token_ids", bool, (C, H), "Tokens in `logprobs` are written as `token_id:7`.", True),
    _harmless("return_token_ids", (C, H, G), "Every answer has `token_ids` and `prompt_token_ids`.", True, bool),
    _refused(
        "return_token_offsets", (C, H), "The positions of tokens in the prompt's text are not known.", True, False
    ),
    _done(
        "return_prompt_text",
        bool,
        (H,),
        "The answer, or the first event of a stream, has `prompt_text`: what the chat template made of the messages.",
        True,
    ),
    _refused("include_reasoning", (H,), "Reasoning is not separated from the rest of an answer.", False, True),
    _done(
        "return_routed_experts",
        bool,
        (C, H, S),
        "Each choice has `routed_experts`, as vLLM's with `--enable-return-routed-experts`: [which experts](routes.md) each token took. A model without experts: 400.",
        True,
    ),
    _done(
        "routed_experts_prompt_start",
        int,
        (C, H, S),
        "`routed_experts` begins at this token of the prompt. Above 0 without `return_routed_experts`: 400.",
        1,
    ),
    _done("request_id", str, (C, H, G), "Part of the answer's `id` (`request_id` for generate).", "r1"),
    _done("stream", bool, (C, H), "The answer is sent as events, [as its tokens are drawn](#streams).", True),
    _refused("stream", (G,), "Answers are not streamed.", True, False),
    _done(
        "stream_options",
        dict[str, Any],
        (C, H),
        "`include_usage`, and with it `continuous_usage_stats`: each event has the tokens of its choice so far. Others, unless false: 400.",
        {"include_usage": True},
    ),
    _refused("stream_options", (G,), "Answers are not streamed.", {"include_usage": True}),
    _done(
        "stream_interval",
        int,
        (C, H),
        "As vLLM: after the first event of a choice, each has at least so many tokens, except the last.",
        4,
    ),
    _harmless("stream_interval", (S,), "Answers of this endpoint are not streamed.", 4, int),
    _refused("output_mode", (G,), "Answers have tokens but no text.", "text", "tokens"),
)

_SERVICE: Final = (
    _done(
        "min_version",
        int | list[int],
        (C, H, G),
        "No token is from an older version of the model than this number, or [epoch, number]; also as the header `X-Min-Version`. [409](#versions) until it is sealed.",
        0,
    ),
    _done(
        "exact_version",
        int | list[int],
        (C, H, G),
        "Each token is from this version; also as the header `X-Exact-Version`. [409](#versions) if it is not the newest.",
        0,
    ),
    _done(
        "session_id",
        str,
        (C, H),
        "Requests of one session go to the node that has its prefix in its cache, while that node has room.",
        "s",
    ),
    _done("prompt_cache_key", str, (C, H), "As `session_id`, if that is missing.", "s"),
    _done("user", str, (C, H), "As `session_id`, if that and `prompt_cache_key` are missing.", "u"),
    _harmless("safety_identifier", (H,), "It is not used.", "u"),
    _harmless("metadata", (C, H), "Requests are not stored, so there is nothing to label.", {"a": "b"}),
    _refused("store", (H,), "Requests are not stored.", True, False),
    _refused("service_tier", (H,), "There is one tier.", "priority", "auto", "default"),
    _harmless("prompt_cache_retention", (H,), "Engines keep prefixes for as long as they have room.", "24h"),
    _harmless(
        "prompt_cache_options", (H,), "Engines keep prefixes for as long as they have room.", {"mode": "explicit"}
    ),
    _harmless(
        "cache_salt",
        (C, H, G),
        "Engines never use the cached prefix of another version. Within a version, the requests of all clients share prefixes.",
        "1",
    ),
    _refused("priority", (C, H, G), "Requests have no priorities.", 1, 0),
    _refused("kv_transfer_params", (C, H, G), "Engines do not transfer caches.", {"a": 1}, {}),
    _refused("ec_transfer_params", (C, H, G), "Engines do not transfer caches.", {"a": 1}, {}),
)

_INSIDE_VLLM: Final = (
    _harmless("detokenize", (S,), "The answer has no text. Stop texts are searched nevertheless.", False, bool),
    _harmless("output_kind", (S,), "Answers of this endpoint are not streamed.", 2),
    _harmless("flat_logprobs", (S,), "It concerns how vLLM stores them in memory.", True),
    _harmless("skip_clone", (S,), "It concerns how vLLM stores parameters in memory.", True),
    _harmless("output_text_buffer_length", (S,), "It concerns how vLLM streams text.", 4),
    _harmless("skip_reading_prefix_cache", (S,), "An engine may read the prefix from its cache.", True),
    _refused("prompt_logprob_token_ids", (S,), "`prompt_logprobs` names the likeliest tokens, and no others.", [[1]]),
    _refused("prompt_logprob_start", (S,), "`prompt_logprobs` is of the whole prompt.", 1),
    _refused("trace_decode_token_ids", (S,), "Tokens are sampled, not given.", [1]),
    _refused("extra_args", (S,), "No extension reads it.", {"a": 1}, {}),
)

PARAMETERS: Final = (*_SAMPLING, *_PROMPT, *_ANSWER, *_SERVICE, *_INSIDE_VLLM)


def markdown() -> str:
    """The table of docs/parameters.md."""
    lines = ["| field | of | what happens | |", "|---|---|---|---|"]
    for row in sorted(PARAMETERS, key=lambda row: (row.name, row.on)):
        nothing = f" Accepted: {', '.join(f'`{msgspec.json.encode(v).decode()}`' for v in row.nothing)}."
        says = row.says + (nothing if row.nothing else "")
        lines.append(f"| `{row.name}` | {', '.join(row.on)} | {row.happens} | {says} |")
    return "\n".join(lines)
