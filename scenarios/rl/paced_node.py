"""A node as `swarm-node join` starts it, except that its engine process runs `scenarios.rl.paced:PacedEngine`.

SCENARIO_TOKENS_S=200 SWARM_HOME=FOLDER python -m scenarios.rl.paced_node join TICKET --model BASE --name fast
"""

import argparse
import os
from pathlib import Path
from typing import Any, Final, cast

import trio

from node.member import join
from node.settings import logs
from node.settings.config import JoinConfig
from node.settings.ticket import Ticket

ENGINE: Final = "scenarios.rl.paced:PacedEngine"


def main() -> None:
    """Run a node with this engine until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["join"])
    parser.add_argument("ticket")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    options = parser.parse_args()
    logs.configure()
    config = JoinConfig(
        home=Path(os.environ["SWARM_HOME"]),
        model=options.model,
        name=options.name,
        listen=(options.listen,),
        engine=cast(Any, ENGINE),
        threads=1,
    )
    trio.run(join.run, Ticket.parse(options.ticket), config)


if __name__ == "__main__":
    main()
