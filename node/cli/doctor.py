"""The command doctor: whether this machine will be useful to a swarm, and what to do where it is not."""

import os
import shutil
import sys
from functools import partial
from typing import Annotated

from cyclopts import App, Parameter

from node.cli.report import LEND, AsJson, offer, print_json
from node.settings.config import JoinConfig
from swarm.transport.left_out import leave_out

__all__ = ["register"]


async def doctor(
    ticket: str = "", /, *, config: Annotated[JoinConfig, Parameter(name="*")] = JoinConfig(), as_json: AsJson = False
) -> int:
    """Say whether this machine will be useful to a swarm, and what to do where it is not.

    Each line is ok, or says what it costs you and what mends it: ticket, seed, clock, address (port mapping and NAT),
    rates to the seed and to a neighbour, disk, memory for this model, limits, container, GPU, engine, and the GPUs of
    each engine. It takes the flags of join, and checks what join would do with them. Without a ticket it looks at this
    machine only. With one it visits the swarm for some seconds: it joins, fetches a few MB from the seed and from one
    member, and leaves. The exit code is 1 if something stops this machine from being useful.

    Parameters
    ----------
    ticket
        What swarm-node invite printed; - reads it from standard input. It takes precedence over SWARM_TICKET, and so
        does --ticket-file; give only one of the two.
    """
    from node.settings.given import ticket_text

    wanted = bool(ticket or config.ticket_file or os.environ.get("SWARM_TICKET"))
    text = ticket_text(ticket, config.ticket_file) if wanted else ""
    leave_out()
    from node.cli.lifetime import owner_only, until_signalled
    from node.doctor.checks import gather
    from node.doctor.report import as_json as plain
    from node.doctor.report import as_text
    from node.doctor.rules import examine, useful
    from node.settings.logs import configure

    owner_only()
    configure("error")  # what goes wrong is what the lines say
    if text and sys.stderr.isatty():
        print("Visiting the swarm; some seconds ...", file=sys.stderr)
    lines = examine(await until_signalled(partial(gather, text, config)))
    if as_json:
        print_json(plain(lines))
    else:
        print(as_text(lines, shutil.get_terminal_size().columns))
    return 0 if useful(lines) else 1


def register(app: App) -> None:
    offer(
        app,
        doctor,
        LEND,
        "swarm-node doctor                                       (this machine only)",
        "swarm-node doctor swarm1...",
        "swarm-node doctor - --engine vllm --vllm-python ~/vllm/bin/python --tp 2",
        "swarm-node doctor swarm1... --listen 4001 --announce 203.0.113.7:31001",
        "swarm-node doctor --model ~/Qwen3-8B --json              (does it fit here?)",
    )
