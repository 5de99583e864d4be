"""swarm.toml: where it is looked for, what is in it, and on which line a mistake stands.

`swarm.toml` is the file that SWARM_CONFIG names; else the one in the current folder, in the user's configuration folder
(`~/.config/swarm-node`), or in `/etc/swarm-node`, whichever is found first. A key at the top level applies to every
command in which it means the same. A key in a table named like a command applies to that command only, and has
precedence:

    home = "/data/swarm"
    up_mbit = 200

    [join]
    engine = "none"
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from platformdirs import user_config_path

from codec.errors import UsageError
from node.settings.definitions import CONFIGURABLE, Setting, complaint, means_the_same, settings_of, top_level

__all__ = ["FILE_NAME", "Entry", "TomlFile", "candidates", "toml_path"]

FILE_NAME: Final = "swarm.toml"
SYSTEM_FOLDER: Final = Path("/etc/swarm-node")
_MAX_BYTES: Final = 1 << 20
_HEADER: Final = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY: Final = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|([A-Za-z0-9_-]+))\s*(?:=|\.)""")


def candidates() -> list[Path]:
    """Where swarm.toml is looked for, in this order, unless SWARM_CONFIG names it."""
    return [Path(FILE_NAME), user_config_path("swarm-node") / FILE_NAME, SYSTEM_FOLDER / FILE_NAME]


def toml_path() -> Path | None:
    """The configuration file, if there is one. Raises `UsageError` when SWARM_CONFIG names a missing file."""
    named = os.environ.get("SWARM_CONFIG")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise UsageError(f"SWARM_CONFIG names {named}, and there is no such file.")
        return path
    return next((path for path in candidates() if path.is_file()), None)


class Entry(NamedTuple):
    """A value, and the line on which it stands (0: not known)."""

    value: Any
    line: int


class TomlFile:
    """The checked content of a file. `entries`: by table ("" for the top level) and key."""

    def __init__(self, path: Path) -> None:
        """Raises `UsageError` that names the line of an unknown key or table, or of a value of a wrong type."""
        self.path = path
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_BYTES).decode()
            content = tomllib.loads(text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        self._lines = dict(_lines_of(text))
        self.entries: dict[tuple[str, str], Entry] = {}
        for name, value in content.items():
            if isinstance(value, dict):
                self._add_table(name, value)
            else:
                self._add("", name, value, top_level())

    def values_for(self, command: str) -> dict[str, Entry]:
        """What the file says for a command that has settings."""
        known = settings_of(command)
        found = {
            key: entry
            for (table, key), entry in self.entries.items()
            if not table and key in known and means_the_same(command, key)
        }
        return found | {key: entry for (table, key), entry in self.entries.items() if table == command}

    def _add_table(self, name: str, content: dict[str, Any]) -> None:
        if name not in CONFIGURABLE:
            raise UsageError(
                f"{self._at('', name)}: there is no table [{name}]."
                f"{_hint(name, CONFIGURABLE)} Tables are named like commands: {', '.join(CONFIGURABLE)}."
            )
        for key, value in content.items():
            self._add(name, key, value, {key: [setting] for key, setting in settings_of(name).items()})

    def _add(self, table: str, name: str, value: Any, known: dict[str, list[Setting]]) -> None:
        key = name.replace("-", "_")
        where = f" in [{table}]" if table else ""
        if key not in known:
            if not table and key in CONFIGURABLE:
                raise UsageError(f"{self._at(table, name)}: {name} is a table; write [{name}] on a line of its own.")
            near = known if table else [*known, *CONFIGURABLE]
            raise UsageError(f"{self._at(table, name)}: nothing is called {name!r}{where}.{_hint(key, near)} {_SEE}")
        wrong = [complaint(setting, value) for setting in known[key]]
        if all(wrong):
            raise UsageError(
                f"{self._at(table, name)}: {name}{where} has to be {wrong[0]}, not {_shown(value)}. {_SEE}"
            )
        self.entries[table, key] = Entry(value, self._lines.get((table, name), 0))

    def _at(self, table: str, name: str) -> str:
        line = self._lines.get((table, name), 0)
        return f"{self.path}, line {line}" if line else str(self.path)


_SEE: Final = "swarm-node config init --stdout shows every setting."


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f" Do you mean {near[0]}?" if near else ""


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else text[:57] + "..."


def _lines_of(text: str) -> Iterator[tuple[tuple[str, str], int]]:
    """The line on which each key and table stands, by (table, name); a table's by ("", name).

    The text is valid TOML. A line inside a multi-line text or list is not taken for a key.
    """
    table, closing, depth = "", "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if closing:
            if closing in line:
                closing = ""
            continue
        if depth == 0 and (header := _HEADER.match(line)):
            table = header[1].strip("\"'")
            yield ("", table), number
            continue
        if depth == 0 and (key := _KEY.match(line)):
            yield (table, next(filter(None, key.groups()))), number
        bare = re.sub(r'"(?:[^"\\]|\\.)*"(?!")|\'[^\']*\'(?!\')|#.*', "", line) if not _opens(line) else ""
        depth += bare.count("[") + bare.count("{") - bare.count("]") - bare.count("}")
        closing = _opens(line)


def _opens(line: str) -> str:
    """The quotes with which a line begins a multi-line text that it does not end; empty: none."""
    found = re.search(r'"""|' + r"'''", line)
    if found is None or found[0] in line[found.end() :]:
        return ""
    return found[0]
