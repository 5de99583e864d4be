"""Where a flag's value comes from when it is not on the command line: `SWARM_*`, then `swarm.toml`, then its default.

A flag of a command has a variable of its own, `SWARM_COMMAND_KEY` (SWARM_JOIN_UP_MBIT, SWARM_STATUS_WATCH). Where a
setting means the same in every command that has it, `SWARM_KEY` sets it for all of them; so no variable means two
things. Of these, commands without settings (status, page, publish ...) take SWARM_HOME only, as they take only `home`
from the file.
"""

from typing import Any, Final

from cyclopts import App, ArgumentCollection
from cyclopts.argument import Argument
from cyclopts.config import Dict, Env

from node.settings.definitions import CONFIGURABLE, SETTINGS_OF, keys_of, means_the_same, settings_of
from node.settings.toml_file import TomlFile, toml_path

__all__ = ["CONFIGURABLE", "Toml", "Variables", "explain", "toml_path"]

_PREFIX: Final = "SWARM_"
_EVERYWHERE: Final = "home"
"""The one key that commands without settings take from elsewhere."""
_TICKET: Final = "ticket"
_WITH_TICKET: Final = frozenset({"join", "relay", "standby", "doctor"})
"""Commands whose argument TICKET may come from SWARM_TICKET. In others an argument of that name says what to revoke."""
_HIDDEN: Final = "(hidden)"


def _command(commands: tuple[str, ...]) -> str:
    """The command whose settings these words take: that of `swarm-node doctor` is join."""
    name = commands[0] if commands else ""
    return SETTINGS_OF.get(name, name)


def _own_prefix(words: tuple[str, ...]) -> str:
    """How the variables of one command begin: SWARM_JOIN_, SWARM_CONFIG_SHOW_."""
    return f"{_PREFIX}{'_'.join(words).upper().replace('-', '_')}_"


def _key(argument: Argument) -> str:
    return argument.name.lstrip("-").replace("-", "_").lower()


class Variables(Env):
    """SWARM_* as a source for cyclopts."""

    def __init__(self) -> None:
        super().__init__(_PREFIX, command=False)

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        for words in dict.fromkeys((commands, (_command(commands),))):
            Env(_own_prefix(words), command=False)(app, commands, arguments)
        shared = [argument for argument in arguments if self._is_shared(commands, argument)]
        super().__call__(app, commands, ArgumentCollection(shared))

    def _convert_argument(self, commands: tuple[str, ...], argument: Argument) -> str:
        """For the help: the variable that is tried last, and is the shortest."""
        if self._is_shared(commands, argument):
            return _PREFIX + _key(argument).upper()
        return _own_prefix(commands) + _key(argument).upper()

    @staticmethod
    def _is_shared(commands: tuple[str, ...], argument: Argument) -> bool:
        """Whether SWARM_KEY sets this argument."""
        command, key = _command(commands), _key(argument)
        if key == _TICKET:
            return bool(commands) and commands[0] in _WITH_TICKET
        if command in CONFIGURABLE:
            return key in keys_of(command) and means_the_same(command, key)
        return key == _EVERYWHERE


class Toml:
    """swarm.toml as a source for cyclopts, which calls it once for each command line to fill flags without a value."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        command, path = _command(commands), toml_path()
        if path is None or not commands:
            return
        if command in CONFIGURABLE:
            entries = TomlFile(path).values_for(command)
        elif any(_key(argument) == _EVERYWHERE for argument in arguments):
            home = TomlFile(path).entries.get(("", _EVERYWHERE))
            entries = {} if home is None else {_EVERYWHERE: home}
        else:
            return
        for key, entry in entries.items():  # one at a time, so that each has its line as its source
            source = f"{path}:{entry.line}" if entry.line else str(path)
            Dict({key: entry.value}, source=source, use_commands_as_keys=False)(app, commands, arguments)


def sources() -> tuple[Variables, Toml]:
    """The sources of values behind the flags, in order of precedence."""
    return Variables(), Toml()


def explain(app: App, command: str) -> dict[str, dict[str, Any]]:
    """For each setting of `command`: its `value`, and its `source` (a variable, a file and line, or "default").

    A secret's value is not shown.
    """
    sub = app[command]
    with app.app_stack([app, sub]):
        arguments = sub.assemble_argument_collection()
        for source in sources():
            source(sub, (command,), arguments)
    known = settings_of(command)
    shown: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        name = argument.keys[0] if argument.keys else ""
        if name not in known:
            continue
        tokens = argument.tokens
        if tokens:
            origin = tokens[0].keyword if tokens[0].source == "env" else tokens[0].source
            value: Any = [token.value for token in tokens] if len(tokens) > 1 else tokens[0].value
        else:
            origin, value = "default", known[name].default
        if value and known[name].secret:
            value = _HIDDEN
        shown[name] = {"value": value, "source": origin}
    return shown
