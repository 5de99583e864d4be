"""The commands sleep and wake: a node's engines leave the GPU to a trainer, and come back."""

from collections.abc import Callable
from pathlib import Path

from cyclopts import App

from node.cli.report import LEND, AsJson, offer, print_json
from node.settings.config import default_home

__all__ = ["register"]


def sleep(*, home: Path | None = None, within: str = "60s", as_json: AsJson = False) -> None:
    """Free the memory of this machine's engines, so that a trainer on the same GPU can use it, until wake.

    The node finishes the work that it has, gives the rest back to the swarm, and ends its engines' processes. It stays
    in the swarm, receives every version and passes it on. A node that is restarted is awake.

    Parameters
    ----------
    home
        The node's SWARM_HOME.
    within
        How long to finish work, as 20s or 5m; what is not finished by then is given back.
    """
    from node.settings.addresses import duration_s
    from node.status.sleeping import sleep_engines

    finished = _asked(sleep_engines, home, duration_s(within))
    if as_json:
        print_json({"asleep": True, "finished": finished})
    else:
        print("The engines are asleep; " + ("all work was finished." if finished else "some work was given back."))


def wake(*, home: Path | None = None, timeout: str = "10m", as_json: AsJson = False) -> int:
    """Start this machine's engines again, and wait until one has proven the newest weights.

    The exit code is 1 if none is ready within the time; they go on loading.

    Parameters
    ----------
    home
        The node's SWARM_HOME.
    timeout
        How long to wait at most, as 90s or 10m.
    """
    from node.settings.addresses import duration_s
    from node.status.sleeping import wake_engines

    ready = _asked(wake_engines, home, duration_s(timeout))
    if as_json:
        print_json({"asleep": False, "ready": ready})
    else:
        print("An engine is ready." if ready else "The engines were started; none is ready yet: see swarm-node status.")
    return 0 if ready else 1


def _asked(ask: Callable[[Path, float], bool], home: Path | None, within_s: float) -> bool:
    """The node's answer. Raises `Unreachable` when none answers."""
    from node.status.sleeping import NodeAway
    from swarm.transport.base import Unreachable

    try:
        return ask((home or default_home()).expanduser().absolute(), within_s)
    except NodeAway as error:
        raise Unreachable(str(error)) from error


def register(app: App) -> None:
    offer(app, sleep, LEND, "swarm-node sleep", "swarm-node sleep --within 5s --home ~/node-home")
    offer(app, wake, LEND, "swarm-node wake", "swarm-node wake --timeout 3m --json")
