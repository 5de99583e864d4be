"""Every setting of every command as data: key, type, default and help, taken from the classes of `config`.

`swarm.toml`'s checks, its example, its JSON schema and `config show` all come from here, so a setting is defined once.
"""

import ast
import dataclasses
import inspect
import textwrap
import types
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from node.settings.config import DemoConfig, GatewayConfig, InviteConfig, JoinConfig, RelayConfig, SeedConfig
from node.settings.standby_config import StandbyConfig

__all__ = [
    "CONFIGURABLE",
    "SETTINGS_OF",
    "Setting",
    "complaint",
    "keys_of",
    "means_the_same",
    "settings_of",
    "top_level",
]

CONFIGURABLE: Final = {
    "seed": SeedConfig,
    "join": JoinConfig,
    "relay": RelayConfig,
    "standby": StandbyConfig,
    "invite": InviteConfig,
    "gateway": GatewayConfig,
    "demo": DemoConfig,
}
"""The commands that have settings: a table of swarm.toml may have one of these names."""
SETTINGS_OF: Final = {"doctor": "join"}
"""Commands that take another one's settings."""
_OTHER_MEANING: Final = frozenset({("demo", "nodes"), ("demo", "model"), ("demo", "engine"), ("demo", "seed")})
"""Settings whose key means another thing in another command, or is a command's name. Neither the top level of
swarm.toml nor SWARM_KEY sets them; their own table and SWARM_COMMAND_KEY do."""
_SECRET: Final = frozenset({"api_key"})

Kind = Literal["text", "path", "number", "integer", "flag", "texts"]


class Setting(NamedTuple):
    """One setting of one command. `default` None: there is none. `choices`: the only values; empty: any."""

    key: str
    kind: Kind
    choices: tuple[str, ...]
    default: Any
    help: str
    own: bool
    """The default is this machine's (a name, a folder), not a constant."""

    @property
    def secret(self) -> bool:
        return self.key in _SECRET


@cache
def keys_of(command: str) -> frozenset[str]:
    """The keys of `settings_of`, without the cost of the help texts."""
    return frozenset(field.name for field in dataclasses.fields(CONFIGURABLE[command]))


@cache
def settings_of(command: str) -> dict[str, Setting]:
    """The settings of a command that has some, by key, in the order of `--help`."""
    config = CONFIGURABLE[command]
    hints, help_ = get_type_hints(config), _docs(config)
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(config):
        kind, choices = _kind(hints[field.name])
        own = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        found[field.name] = Setting(field.name, kind, choices, _plain(default), help_[field.name], own)
    return found


def means_the_same(command: str, key: str) -> bool:
    """Whether this key of a command means what it means in every command that has it."""
    return (command, key) not in _OTHER_MEANING


@cache
def top_level() -> dict[str, list[Setting]]:
    """What may stand at the top level of swarm.toml: by key, the setting of each command that it applies to."""
    found: dict[str, list[Setting]] = {}
    for command in CONFIGURABLE:
        for key, setting in settings_of(command).items():
            if means_the_same(command, key):
                found.setdefault(key, []).append(setting)
    return found


def complaint(setting: Setting, value: Any) -> str:
    """What is wrong with the type of a value from a TOML file; empty: nothing."""
    if setting.choices:
        return "" if value in setting.choices else f"one of {', '.join(setting.choices)}"
    match setting.kind:
        case "flag":
            return "" if isinstance(value, bool) else "true or false"
        case "integer":
            return "" if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
        case "number":
            return "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
        case "texts":
            texts = value if isinstance(value, list) else [value]
            return "" if all(map(_is_text, texts)) else 'a list of texts, as ["a", "b"]'
        case "path":
            return "" if isinstance(value, str) else "a path, in quotes"
        case _:
            return "" if _is_text(value) else "a text, in quotes"


def _is_text(value: Any) -> bool:
    """A port may stand without quotes."""
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _kind(hint: Any) -> tuple[Kind, tuple[str, ...]]:
    """The kind of a type hint, and its choices. `X | None` is as X."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is Literal:
        return "text", get_args(hint)
    if get_origin(hint) is tuple:
        return "texts", ()
    kinds: dict[Any, Kind] = {str: "text", Path: "path", float: "number", int: "integer", bool: "flag"}
    return kinds[hint], ()


def _plain(default: Any) -> Any:
    """A default as a TOML value; None: there is none."""
    if isinstance(default, tuple):
        return list(default)
    return str(default) if isinstance(default, Path) else default


def _docs(config: type) -> dict[str, str]:
    """The docstring below each field of a class and its bases, on one line."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[statement.target.id] = " ".join(str(below.value.value).split())
    return found
