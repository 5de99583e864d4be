"""Between text and token ids, as the base checkpoint says: its tokenizer, its chat template, its stop tokens.

Needs neither torch nor transformers; `tokenizers` and `jinja2` only where text is used at all.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from codec.errors import UsageError
from node.engines.texts import Continuation, StopText
from node.ledger.model_limits import limits_of
from node.settings.extras import how_to_get, lacking

__all__ = ["BadText", "Text"]

MAX_CHARACTERS: Final = 4 << 20
"""More cannot be as few tokens as a prompt may have, of any tokenizer."""


_CONTINUED: Final = "CONTINUED-HERE-9f2c "
"""Put behind a message that is continued, to find its end in what the template makes of it."""


class BadText(ValueError):
    """What the client sent cannot be made into tokens; the message is for it."""


class Text:
    """`files`: the base's small files, by name."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Raises `UsageError` when a file is damaged."""
        configs = {name: _json(files, name) for name in ("config.json", "generation_config.json")}
        self._config = _json(files, "tokenizer_config.json")
        self._tokenizer = _tokenizer(files.get("tokenizer.json"))
        self._template = _template(files, self._config)
        self._compiled: Any = None
        self._variables: frozenset[str] | None = None
        model = configs["config.json"]
        said = model.get("text_config")
        inner: dict[str, Any] = said if isinstance(said, dict) else {}
        self.limits = limits_of(files)
        """The same that `rollouts` goes by."""
        ends = [c.get("eos_token_id") for c in (configs["generation_config.json"], model, inner)]
        self.stop_tokens = self._stops(next((end for end in ends if end is not None), None))

    def _stops(self, said: Any) -> tuple[int, ...]:
        if isinstance(said, int):
            return (said,)
        if isinstance(said, list):
            return tuple(int(token) for token in said)
        end = _content(self._config.get("eos_token"))
        found = self._tokenizer.token_to_id(end) if self._tokenizer is not None and end else None
        return () if found is None else (found,)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """`special`: with the tokens that this model begins a text with. Raises `BadText`."""
        if self._tokenizer is None:
            raise BadText("This model's base has no tokenizer.json: give the prompt as token ids.")
        if len(text) > MAX_CHARACTERS:
            raise BadText(f"The prompt is longer than {MAX_CHARACTERS} characters.")
        # Not `encode`, which holds the interpreter's lock: the seed would stand still, six seconds for a body of 4 MiB.
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    @property
    def has_tokenizer(self) -> bool:
        """Text can be read and written at all."""
        return self._tokenizer is not None

    def decode(self, prompt: Sequence[int], token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens that follow `prompt`; empty without a tokenizer. `special`: with special tokens."""
        if self._tokenizer is None:
            return ""
        text = Continuation(self._tokenizer, prompt, special=special)
        return "".join(text.add(token) for token in token_ids)

    def stop_text(self, prompt: Sequence[int], stops: Sequence[str], *, special: bool, least: int) -> StopText:
        """Finds a stop text as engines do; see `node.engines.texts`. Not without a tokenizer."""
        assert self._tokenizer is not None
        return StopText(self._tokenizer, prompt, stops, special=special, least=least)

    def token(self, token_id: int) -> str:
        """One token for people: its text, or its id where it has none."""
        if self._tokenizer is None or self._tokenizer.id_to_token(token_id) is None:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def reads(self, name: str) -> bool:
        """The chat template reads this variable."""
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
        """A conversation as the text that the model was trained on. `open_ended`: up to the end of what the last
        message says, and nothing of what the template puts behind it. Raises `BadText`."""
        if not open_ended:
            return self._render(messages, tools, more)
        *before, last = messages
        said = last.get("content")
        if not isinstance(said, str):
            raise BadText("continue_final_message: the last message has no text.")
        rendered = self._render([*before, {**last, "content": said + _CONTINUED}], tools, more)
        at = rendered.rfind(_CONTINUED.strip())
        if at < 0:
            raise BadText("continue_final_message: the chat template does not write what the last message says.")
        kept = rendered[:at]  # a template that strips messages took the space off the mark's end
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
    said = config.get("chat_template")
    if isinstance(said, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in said if isinstance(entry, dict)}
        said = named.get("default")
    return said if isinstance(said, str) else None


def _content(token: Any) -> str:
    """A special token, which is a string or an object that has one."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _environment() -> Any:
    """As chat templates expect it; sandboxed, for a template is a program that came with a model."""
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
