"""A node as `swarm-node join` starts it, with the engine of `scenarios.faults.dice`.

SWARM_HOME=FOLDER python -m scenarios.faults.small_node join TICKET --model BASE --name a --replica disk
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import trio

from node.cli.lifetime import Interrupted, until_signalled
from node.member import join
from node.settings import logs
from node.settings.config import JoinConfig
from node.settings.ticket import Ticket

ENGINE: Final = "scenarios.faults.dice:DiceEngine"
"""At most 32 characters: it is the name that the node reports."""


def main() -> None:
    """Run the node until a signal ends it. SIGTERM has it leave the swarm, as `swarm-node join` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["join"])
    parser.add_argument("ticket")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--replica", default="ram")
    parser.add_argument("--up-mbit", type=float)
    options = parser.parse_args()
    logs.configure()
    config = JoinConfig(
        home=Path(os.environ["SWARM_HOME"]),
        model=options.model,
        name=options.name,
        listen=(options.listen,),
        engine=cast(Any, ENGINE),
        replica=options.replica,
        up_mbit=options.up_mbit,
    )
    try:
        trio.run(until_signalled, partial(join.run, Ticket.parse(options.ticket), config))
    except Interrupted as interrupted:
        sys.exit(interrupted.args[1])


if __name__ == "__main__":
    main()
