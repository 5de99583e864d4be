"""Commands on a rollout machine: join, relay."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from codec.errors import UsageError
from node.cli.report import LEND, offer
from node.settings.config import JoinConfig, RelayConfig
from node.settings.extras import how_to_get, lacking
from swarm.transport.left_out import leave_out

__all__ = ["register"]

_ENGINE_NEEDS: Final = {"none": (), "transformers": ("torch", "transformers"), "vllm": (), "sglang": ()}


def check_engine(engine: str) -> None:
    """Raise `UsageError` if the packages of `engine` are not installed; does not import them."""
    if missing := lacking(_ENGINE_NEEDS[engine]):
        raise UsageError(
            f"--engine {engine} needs {' and '.join(missing)}: {how_to_get('torch')}. "
            "With --engine none this machine holds the policy and passes it on, but generates nothing."
        )


def check_vllm(python: Path | None) -> None:
    """Raise `UsageError` unless that environment (None: this one) has a vLLM that can follow a swarm."""
    from node.engines.vllm.installed import installed

    installed(python or Path(sys.executable))


def check_sglang(python: Path | None) -> None:
    """Raise `UsageError` unless that environment (None: this one) has an SGLang that can follow a swarm."""
    from node.engines.sglang.installed import installed

    installed(python or Path(sys.executable))


async def join(ticket: str = "", /, *, config: Annotated[JoinConfig, Parameter(name="*")] = JoinConfig()) -> None:
    """Join a swarm, hold its policy and generate rollouts, until interrupted.

    Parameters
    ----------
    ticket
        What swarm-node invite printed; - reads it from standard input. It takes precedence over SWARM_TICKET, and so
        does --ticket-file; give only one of the two.
    """
    from node.settings.given import ticket_text
    from node.settings.ticket import Ticket

    parsed = Ticket.parse(ticket_text(ticket, config.ticket_file))
    check_engine(config.engine)
    if config.engine == "vllm" and not config.engine_url:
        check_vllm(config.vllm_python)
    if config.engine == "sglang" and not config.engine_url:
        check_sglang(config.sglang_python)
    leave_out()
    from node.cli.lifetime import OnTerm, owner_only, until_signalled
    from node.member.finishing import Finishing
    from node.member.join import LEAVES_WITHIN_S, run

    owner_only()
    if config.finish_within_s is None:
        await until_signalled(partial(run, parsed, config))
        return
    finishing = Finishing(config.finish_within_s)
    on_term = OnTerm(finishing.asked.set, finishing.within_s + LEAVES_WITHIN_S)
    await until_signalled(partial(run, parsed, config, finishing=finishing), on_term)


async def relay(ticket: str = "", /, *, config: Annotated[RelayConfig, Parameter(name="*")] = RelayConfig()) -> None:
    """Join a swarm and pass chunks on, until interrupted: without a model, a GPU or torch.

    On a machine that can be dialed from the internet, it also connects machines that cannot be: start those with --via
    and this machine's address. What passes through is encrypted between the two ends.

    Parameters
    ----------
    ticket
        What swarm-node invite printed; - reads it from standard input. It takes precedence over SWARM_TICKET, and so
        does --ticket-file; give only one of the two.
    """
    from node.settings.given import ticket_text
    from node.settings.ticket import Ticket

    parsed = Ticket.parse(ticket_text(ticket, config.ticket_file))
    leave_out()
    from node.cli.lifetime import owner_only, until_signalled
    from node.member.relay import run

    owner_only()
    await until_signalled(partial(run, parsed, config))


def register(app: App) -> None:
    offer(
        app,
        join,
        LEND,
        "swarm-node join swarm1...",
        "swarm-node join -                                       (asks for the ticket, or reads it from a pipe)",
        "swarm-node join --ticket-file /run/secrets/ticket",
        "swarm-node join swarm1... --model ~/Qwen3-8B --up-mbit 200",
        "swarm-node join swarm1... --engine vllm --vllm-python ~/vllm/bin/python --engines 4 --tp 2",
        "swarm-node join swarm1... --engine-url http://127.0.0.1:8000",
        "swarm-node join swarm1... --up-mbit 200 --up-gb-day 50",
        "swarm-node join swarm1... --listen 4001 --announce 203.0.113.7:31001",
        "swarm-node join swarm1... --finish-within 100s          (SIGTERM finishes the work that is here, and leaves)",
    )
    offer(
        app,
        relay,
        LEND,
        "swarm-node relay swarm1... --up-mbit 900 --up-gb-day 1000",
        "swarm-node relay - < ticket.txt",
        "swarm-node relay swarm1... --announce 203.0.113.9:4001     (then: seed --via 203.0.113.9:4001)",
    )
