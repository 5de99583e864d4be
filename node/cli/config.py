"""Commands about settings: config show, config init, config schema."""

import sys
from pathlib import Path

from cyclopts import App

from codec.errors import UsageError
from node.cli.report import SEE, AsJson, offer, print_json
from node.settings.definitions import CONFIGURABLE
from node.settings.sources import explain
from node.settings.toml_file import FILE_NAME, candidates, toml_path

__all__ = ["register"]


def init(file: Path = Path(FILE_NAME), /, *, stdout: bool = False) -> None:
    """Write a commented swarm.toml: every setting of every command, with its default.

    It is looked for in the current folder, in ~/.config/swarm-node and in /etc/swarm-node; SWARM_CONFIG names any
    other.

    Parameters
    ----------
    file
        File to make. One that exists is not overwritten.
    stdout
        Print it instead.
    """
    from node.settings.example import example

    if stdout:
        print(example())
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as out:
            out.write(example() + "\n")
    except FileExistsError as error:
        raise UsageError(f"{file} exists, and is not overwritten. Name another file, or use --stdout.") from error
    print(file)
    if file.absolute() not in [path.absolute() for path in candidates()]:
        print(f"swarm-node reads it when SWARM_CONFIG={file.absolute()} is set.", file=sys.stderr)


def schema() -> None:
    """Print the JSON schema of swarm.toml, for editors and checks."""
    from node.settings.example import schema

    print_json(schema())


def _show(app: App, command: str | None, as_json: bool) -> None:
    if command is not None and command not in CONFIGURABLE:
        raise UsageError(f"{command} has no settings. These commands have: {', '.join(CONFIGURABLE)}.")
    shown = {name: explain(app, name) for name in ([command] if command else CONFIGURABLE)}
    if as_json:
        print_json({"file": str(toml_path() or ""), "commands": shown})
        return
    print(f"swarm.toml: {toml_path() or 'none'}")
    for name, settings in shown.items():
        print(f"\n[{name}]")
        for key, entry in settings.items():
            value = entry["value"]
            text = "-" if value in (None, "", []) else ", ".join(value) if isinstance(value, list) else str(value)
            print(f"{key:<15} {text:<40} {entry['source']}".rstrip())


def register(app: App) -> None:
    config = App(
        name="config", help="Show what is configured, and where; write a swarm.toml.", help_epilogue="", group=SEE
    )

    def show(command: str | None = None, /, *, as_json: AsJson = False) -> None:
        """Show every setting of a command, or of all commands, and where its value comes from.

        A flag takes precedence over SWARM_* variables, these over swarm.toml, and that over the default.

        Parameters
        ----------
        command
            seed, join, relay, invite, gateway or demo.
        """
        _show(app, command, as_json)

    offer(config, show, None, "swarm-node config show join", "swarm-node config show --json")
    offer(
        config,
        init,
        None,
        "swarm-node config init",
        "swarm-node config init ~/.config/swarm-node/swarm.toml",
        "swarm-node config init --stdout",
    )
    offer(config, schema, None, "swarm-node config schema > swarm.schema.json")
    app.command(config)
