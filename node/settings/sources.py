"""Where a flag's value comes from when it is not on the command line: `SWARM_*`, then `swarm.toml`, then its default.

`swarm.toml` is read from the current folder, or is the file that SWARM_CONFIG names. A key at the top level applies to
every command that has such a flag. A key in a table named like a command applies to that command only, and has
precedence:

    home = "/data/swarm"
    up_mbit = 200

    [join]
    engine = "none"
"""

import difflib
import os
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict, Env

from codec.errors import UsageError
from node.settings.config import DemoConfig, GatewayConfig, InviteConfig, JoinConfig, RelayConfig, SeedConfig

__all__ = ["CONFIGURABLE", "Toml", "explain", "toml_path"]

CONFIGURABLE: Final = {
    "seed": SeedConfig,
    "join": JoinConfig,
    "relay": RelayConfig,
    "invite": InviteConfig,
    "gateway": GatewayConfig,
    "demo": DemoConfig,
}
"""The commands that have settings: a table of swarm.toml may have one of these names."""
_DEFAULT_FILE: Final = "swarm.toml"
_MAX_BYTES: Final = 1 << 20


def toml_path() -> Path | None:
    """The configuration file, if there is one. Raises `UsageError` when SWARM_CONFIG names a missing file."""
    named = os.environ.get("SWARM_CONFIG")
    path = Path(named or _DEFAULT_FILE).expanduser()
    if path.is_file():
        return path
    if named:
        raise UsageError(f"SWARM_CONFIG names {named}, and there is no such file.")
    return None


def _read(path: Path) -> dict[str, Any]:
    """The file's content. Raises `UsageError` for an unknown key or table."""
    try:
        with path.open("rb") as file:
            content = tomllib.loads(file.read(_MAX_BYTES).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    content = {key.replace("-", "_"): value for key, value in content.items()}
    known = {field.name for config in CONFIGURABLE.values() for field in fields(config)} | {"up_mbit", "nodes"}
    for key, value in content.items():
        if isinstance(value, dict) != (key in CONFIGURABLE) or key not in known | set(CONFIGURABLE):
            near = difflib.get_close_matches(key, known | set(CONFIGURABLE), 1)
            hint = f" Do you mean {near[0]}?" if near and near[0] != key else ""
            raise UsageError(f"{path}: nothing is called {key!r} there.{hint} See swarm-node config show.")
    return content


class Toml:
    """swarm.toml as a source for cyclopts, which calls it once for each command line to fill flags without a value."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        path = toml_path()
        if path is None or not commands or commands[0] not in CONFIGURABLE:
            return
        content = _read(path)
        own_keys = {field.name for field in fields(CONFIGURABLE[commands[0]])}
        values = {key: value for key, value in content.items() if key in own_keys}
        values |= content.get(commands[0], {})
        Dict(values, source=str(path), use_commands_as_keys=False)(app, commands, arguments)


def sources() -> tuple[Env, Toml]:
    """The sources of values behind the flags, in order of precedence."""
    return Env("SWARM_", command=False), Toml()


def explain(app: App, command: str) -> dict[str, dict[str, Any]]:
    """For each setting of `command`: its `value`, and its `source` (a variable, a file, or "default")."""
    sub = app[command]
    with app.app_stack([app, sub]):
        arguments = sub.assemble_argument_collection()
        for source in sources():
            source(sub, (command,), arguments)
    config = CONFIGURABLE[command]
    settings: dict[str, dict[str, Any]] = {}
    defaults = {field.name: field for field in fields(config)}
    for argument in arguments:
        name = argument.keys[0] if argument.keys else ""
        if name not in defaults:
            continue
        tokens = argument.tokens
        if tokens:
            origin = tokens[0].keyword if tokens[0].source == "env" else tokens[0].source
            value: Any = [token.value for token in tokens] if len(tokens) > 1 else tokens[0].value
        else:
            origin, value = "default", _plain(argument.field_info.default)
        settings[name] = {"value": value, "source": origin}
    return settings


def _plain(value: Any) -> Any:
    """A default as a JSON value."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    return None
