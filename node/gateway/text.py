"""Converts between text and token ids with the base checkpoint's tokenizer, chat template and stop tokens.

Needs neither torch nor transformers, and `tokenizers` and `jinja2` only where the checkpoint has a tokenizer.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from codec.errors import UsageError
from node.engines.texts import Continuation, StopText
from node.gateway.tool_calls import ToolSyntax, syntax_of
from node.ledger.model_limits import limits_of
from node.settings.extras import how_to_get, lacking

__all__ = ["BadText", "Text"]

MAX_CHARACTERS: Final = 4 << 20
"""No tokenizer makes a longer text into as few tokens as a prompt may have."""


_IMAGE_MARKS: Final = ("image_token_id", "image_token_index", "boi_token_id", "boi_token_index")
"""The names of the tokens in config.json by one of which a chat template marks the place of an image."""
_CONTINUED: Final = "CONTINUED-HERE-9f2c "
"""Appended to a message that is to be continued, to find the end of its text in the rendered conversation."""


class BadText(ValueError):
    """The client's text cannot be converted to tokens. The client is shown the message."""


class Text:
    """The tokenizer, the chat template and the limits of one base checkpoint."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: the checkpoint's small files, by name. Raises `UsageError` when one is damaged."""
        configs = {name: _json(files, name) for name in ("config.json", "generation_config.json")}
        self._config = _json(files, "tokenizer_config.json")
        self._tokenizer = _tokenizer(files.get("tokenizer.json"))
        self._template = _template(files, self._config)
        self._compiled: Any = None
        self._variables: frozenset[str] | None = None
        model = configs["config.json"]
        text_config = model.get("text_config")
        inner: dict[str, Any] = text_config if isinstance(text_config, dict) else {}
        self.reads_images = isinstance(model.get("vision_config"), dict)
        """Whether the model reads images."""
        marks = [model.get(name) for name in _IMAGE_MARKS]
        self._image_marks = frozenset(mark for mark in marks if isinstance(mark, int))
        self.limits = limits_of(files)
        """The same limits as for `rollouts`."""
        ends = [c.get("eos_token_id") for c in (configs["generation_config.json"], model, inner)]
        self.stop_tokens = self._stops(next((end for end in ends if end is not None), None))

    def _stops(self, configured: Any) -> tuple[int, ...]:
        if isinstance(configured, int):
            return (configured,)
        if isinstance(configured, list):
            return tuple(int(token) for token in configured)
        end = _content(self._config.get("eos_token"))
        found = self._tokenizer.token_to_id(end) if self._tokenizer is not None and end else None
        return () if found is None else (found,)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The token ids of `text`; `special`: with the tokens that begin a text of this model. Raises `BadText`."""
        if self._tokenizer is None:
            raise BadText("This model's base has no tokenizer.json: give the prompt as token ids.")
        if len(text) > MAX_CHARACTERS:
            raise BadText(f"The prompt is longer than {MAX_CHARACTERS} characters.")
        # Not `encode`, which holds the interpreter's lock: a body of 4 MiB would stop the seed for six seconds.
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def images_in(self, prompt: Sequence[int]) -> int:
        """How many places of images a prompt has."""
        return sum(token in self._image_marks for token in prompt)

    @property
    def tool_syntax(self) -> ToolSyntax | None:
        """The syntax of tool calls that the chat template teaches; None: it is not known."""
        return syntax_of(self._template)

    @property
    def has_tokenizer(self) -> bool:
        """Whether this model has text at all, not only token ids."""
        return self._tokenizer is not None

    def decode(self, prompt: Sequence[int], token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `token_ids`, which follow `prompt`; empty without a tokenizer. `special`: with special tokens."""
        if (text := self.continuation(prompt, special=special)) is None:
            return ""
        return "".join(text.add(token) for token in token_ids)

    def continuation(self, prompt: Sequence[int], *, special: bool = False) -> Continuation | None:
        """The text of tokens that follow `prompt`, one after another; None without a tokenizer. `special`: with special
        tokens."""
        return None if self._tokenizer is None else Continuation(self._tokenizer, prompt, special=special)

    def stop_text(self, prompt: Sequence[int], stops: Sequence[str], *, special: bool, least: int) -> StopText:
        """Finds a stop text as engines do; see `node.engines.texts`. Needs a tokenizer."""
        assert self._tokenizer is not None
        return StopText(self._tokenizer, prompt, stops, special=special, least=least)

    def token(self, token_id: int) -> str:
        """The text of one token, or its id where it has none."""
        if self._tokenizer is None or self._tokenizer.id_to_token(token_id) is None:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def reads(self, name: str) -> bool:
        """Whether the chat template reads the variable `name`."""
        if self._variables is None:
            import jinja2
            import jinja2.meta

            try:
                parsed = _environment().parse(self._template or "")
                self._variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
            except jinja2.TemplateError:
                self._variables = frozenset()  # `render` says why
        return name in self._variables

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, open_ended: bool = False, **more: Any
    ) -> str:
        """A conversation as text, by the model's chat template. Raises `BadText`.

        `open_ended`: only up to the end of the last message's content, for the model to continue it.
        """
        if not open_ended:
            return self._render(messages, tools, more)
        *before, last = messages
        content = last.get("content")
        if not isinstance(content, str):
            raise BadText("continue_final_message: the last message has no text.")
        rendered = self._render([*before, {**last, "content": content + _CONTINUED}], tools, more)
        at = rendered.rfind(_CONTINUED.strip())
        if at < 0:
            raise BadText("continue_final_message: the chat template does not write what the last message says.")
        kept = rendered[:at]  # a template that strips messages has removed the space at the end of the mark
        return kept if rendered.startswith(_CONTINUED, at) else kept.rstrip()

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, more: Mapping[str, Any]) -> str:
        if self._template is None:
            raise BadText("This model's base has no chat template: use /v1/completions.")
        import jinja2

        try:
            self._compiled = self._compiled or _environment().from_string(self._template)
            names = ("bos_token", "eos_token", "pad_token", "unk_token")
            special = {name: _content(self._config.get(name)) for name in names}
            return self._compiled.render(**{"tools": tools, "documents": None, **special, **more}, messages=messages)
        except (
            jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
        ) as error:  # fmt: skip
            raise BadText(f"The chat template refuses these messages: {error}") from error


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name) or b"{}")
    except ValueError as error:
        raise UsageError(f"{name} of the base checkpoint is no JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _tokenizer(data: bytes | None) -> Any:
    if data is None:
        return None
    if missing := lacking(("tokenizers", "jinja2")):
        raise UsageError(f"Text prompts need {' and '.join(missing)} where the seed runs: {how_to_get('gateway')}")
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # tokenizers raises nothing narrower
        raise UsageError(f"tokenizer.json of the base checkpoint cannot be read: {error}") from error


def _template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if (found := files.get("chat_template.jinja")) is not None:
        return found.decode()
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _content(token: Any) -> str:
    """The text of a special token, which is a string or an object with a `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _environment() -> Any:
    """The jinja environment that chat templates expect; sandboxed, because a template is a program from a model."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(why: str) -> None:
        raise TemplateError(why)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
