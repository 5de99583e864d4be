"""Commands that show something: status, top, page, demo, config show, version."""

import shlex
import sys
import time
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from codec.errors import UsageError
from node.cli.report import SEE, TRY, AsJson, offer, print_json
from node.settings.config import DemoConfig, default_home
from node.settings.sources import CONFIGURABLE, explain, toml_path

if TYPE_CHECKING:
    from node.status.schema import Status
    from node.status.terminal import Picture

__all__ = ["register", "version"]

PAGE_PORT: Final = 4080
LOOK_WITHIN_S: Final = 2.0
"""A live view does not see signals while it waits for an answer."""


def version() -> str:
    """The installed release."""
    return installed_version("swarm-node")


async def status(*, home: Path | None = None, watch: bool = False, prove: bool = False, as_json: AsJson = False) -> int:
    """Show the state of the swarm, as the seed, node or relay of this machine sees it.

    Parameters
    ----------
    home
        SWARM_HOME of the process to ask.
    watch
        Keep showing it until interrupted, also while that process is restarted.
    prove
        First have this machine's engines read back all their weights. Exit code 1 if these are not, bit for bit, the
        weights of the version that the engines generate with.
    """
    from node.status.query import ask
    from node.status.schema import to_plain

    folder = home or default_home()
    answer = ask(folder, prove=prove)
    proven = _is_proven(answer) if prove else True
    if as_json:
        print_json(to_plain(answer))
        return 0 if proven else 1
    from rich.console import Console

    from node.cli.lifetime import until_signalled
    from node.status import terminal

    console = Console()
    if watch:
        await until_signalled(partial(terminal.watch, LastAnswer(folder, answer), console=console, refresh_s=1.0))
    else:
        console.print(terminal.view(terminal.Picture(answer)))
    if prove and proven:
        console.print("Proven: every bit that the engines here hold is the policy's.", style="green")
    elif prove:
        console.print("The engines here do NOT hold the policy's bits. Restart this node.", style="red")
    return 0 if proven else 1


async def page(*, home: Path | None = None, at: str = f"127.0.0.1:{PAGE_PORT}", as_json: AsJson = False) -> None:
    """Serve a web page of the swarm on this machine, until interrupted: trees, versions, work, and what is wrong.

    The page shows the process of SWARM_HOME, which need not know of it, and goes on while that process is restarted.
    For a page that keeps the last hour while nobody looks, start the process with --metrics.

    Parameters
    ----------
    home
        SWARM_HOME of the process to show.
    at
        HOST:PORT to serve at, or a port. On an address that other machines reach, the page needs the token in its URL.
    """
    import trio

    from node.cli.lifetime import until_signalled
    from node.monitor import serve_monitor, status_of
    from node.settings.addresses import host_and_port
    from node.settings.logs import configure

    configure("warning")
    folder = home or default_home()

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            url = await nursery.start(serve_monitor, host_and_port(at), folder, status_of(folder))
            if as_json:
                print_json({"url": url})
            else:
                print(f"{url}\nOpen it in a browser; Ctrl-C ends it.", flush=True)

    await until_signalled(serve)


async def top(*, home: Path | None = None) -> None:
    """Show the swarm in this terminal as the page does: trees, versions, work, and what is wrong. q ends it.

    It shows the process of SWARM_HOME, and goes on while that process is restarted.

    Parameters
    ----------
    home
        SWARM_HOME of the process to show.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "swarm-node top needs a terminal. For a file or a pipe: swarm-node status, with or without --json."
        )
    from node.cli.lifetime import until_signalled
    from node.monitor import Monitor, status_of
    from node.monitor.top.live import show
    from swarm.transport.base import Unreachable

    monitor = Monitor(status_of(home or default_home()))

    async def run() -> None:
        first = await monitor.look()
        if first.away:  # later this is shown; at the start it is likely a wrong home
            raise Unreachable(first.away)
        await show(monitor, first)

    await until_signalled(run)


class LastAnswer:
    """Asks a swarm process, which may be restarted meanwhile: while it does not answer, its last status and a sentence
    that says so."""

    def __init__(self, home: Path, answer: "Status") -> None:
        self._home, self._answer = home, answer
        self._away_since: float | None = None

    def __call__(self) -> "Picture":
        from node.status.query import ask
        from node.status.terminal import Picture
        from swarm.transport.base import Unreachable

        now = time.monotonic()
        try:
            self._answer = ask(self._home, within_s=LOOK_WITHIN_S)
        except Unreachable:
            self._away_since = now if self._away_since is None else self._away_since
            text = (
                f"The {_role(self._answer)} of {self._home} has not answered for {now - self._away_since:.0f} s; "
                "this was its state before. Waiting for it to be started again."
            )
            return Picture(self._answer, away=text)
        self._away_since = None
        return Picture(self._answer)


def _role(answer: "Status") -> str:
    return str(type(answer).__struct_config__.tag)


def _is_proven(answer: "Status") -> bool:
    """Whether the engines hold the right bits. Raises `UsageError` where no engine was asked."""
    from node.status.schema import NodeStatus

    proven = answer.nodes[0].live_proven if isinstance(answer, NodeStatus) else None
    if not isinstance(proven, bool):
        raise UsageError(
            "No engine is ready here, so nothing can be read back. Ask a node that joined with an engine (--home), "
            "once swarm-node status shows what its engine holds."
        )
    return proven


async def demo(*, config: Annotated[DemoConfig, Parameter(name="*")] = DemoConfig(), as_json: AsJson = False) -> int:
    """Run a whole swarm on this machine: a trainer, its seed, and nodes that generate, each a process of its own.

    One node is killed during step 3, and another joins during step 4. At the end the bits of each node and of each
    engine are compared with the trainer's; the exit code is 1 if any differ.
    """
    then = ""
    if config.keep is not None:
        from node.tools.starter import write_starter

        write_starter(config.keep)
        then = f"Next: {shlex.join(['sh', str(config.keep / 'two_boxes.sh')])}"
        if config.only_files:
            if as_json:
                print_json({"folder": str(config.keep)})
            else:
                print(f"Made {config.keep}. {then}")
            return 0
    if config.engine == "vllm":
        from node.cli.member import check_vllm

        check_vllm(config.vllm_python)
    from node.cli.lifetime import until_signalled
    from node.settings.logs import configure
    from node.tools.demo import run

    configure("warning")

    report: dict[str, Any] = await until_signalled(partial(run, config, live=not as_json and sys.stderr.isatty()))
    if as_json:
        print_json(report)
    else:
        from node.tools.demo import render

        print(render(report))
        if config.keep is not None:
            print(f"Kept in {config.keep}. {then}")
    return 0 if report["roots_equal"] and report["engines_equal"] else 1


def _config_show(app: App, command: str | None, as_json: bool) -> None:
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
            print(f"{key:<12} {text:<40} {entry['source']}".rstrip())


def register(app: App) -> None:
    offer(
        app,
        status,
        SEE,
        "swarm-node status",
        "swarm-node status --watch",
        "swarm-node status --prove",
        "swarm-node status --json",
    )
    offer(app, top, SEE, "swarm-node top", "swarm-node top --home ~/seed-home")
    offer(
        app,
        page,
        SEE,
        "swarm-node page",
        "swarm-node page --at 9000 --home ~/seed-home",
        "swarm-node page --at 0.0.0.0:4080                       (other machines need the token in the URL)",
    )
    offer(
        app,
        demo,
        TRY,
        "swarm-node demo",
        "swarm-node demo --nodes 8 --steps 20 --json",
        "swarm-node demo --keep talk --only-files        (a model, steps and a script: docs/quickstart.md)",
    )
    config = App(name="config", help="Show what is configured, and where.", help_epilogue="", group=SEE)

    def show(command: str | None = None, /, *, as_json: AsJson = False) -> None:
        """Show every setting of a command, or of all commands, and where its value comes from.

        A flag takes precedence over SWARM_* variables, these over swarm.toml, and that over the default.

        Parameters
        ----------
        command
            seed, join, relay, invite, gateway or demo.
        """
        _config_show(app, command, as_json)

    offer(config, show, None, "swarm-node config show join", "swarm-node config show --json")
    app.command(config)

    def show_version(*, as_json: AsJson = False) -> None:
        """Print the installed release."""
        if as_json:
            print_json({"swarm-node": version()})
        else:
            print(version())

    app.command(show_version, name="version", group=SEE)
