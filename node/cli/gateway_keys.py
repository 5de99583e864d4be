"""`swarm-node gateway key`: makes, lists and removes the keys of a gateway's clients, each with a quota."""

import time
from pathlib import Path

from cyclopts import App

from node.cli.report import AsJson, offer, print_json
from node.settings.client_keys import KEYS_FILE, Quota, add_key, read_keys, remove_key
from node.settings.config import default_home

__all__ = ["register"]


def add(
    name: str,
    /,
    *,
    requests_per_minute: int = 0,
    tokens_per_minute: int = 0,
    in_flight: int = 0,
    home: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Make a key for a client of the gateway, and show it once.

    The seed keeps only its hash. The gateway takes the key at once, without a restart. While there is a file of keys,
    each client needs one. Beyond its quota a client gets 429 with Retry-After.

    Parameters
    ----------
    name
        Who uses it, for the status and the metrics.
    requests_per_minute
        Requests that it may make in a minute; 0: any number.
    tokens_per_minute
        Tokens of its prompts and answers in a minute; 0: any number.
    in_flight
        Sequences that it may have in flight; 0: any number that the gateway takes.
    home
        The seed's SWARM_HOME.
    """
    from codec.errors import UsageError

    if min(requests_per_minute, tokens_per_minute, in_flight) < 0:
        raise UsageError("--requests-per-minute, --tokens-per-minute, --in-flight: 0 (no limit) or more")
    key = add_key(_path(home), name, Quota(requests_per_minute, tokens_per_minute, in_flight))
    if as_json:
        print_json({"name": name, "key": key})
    else:
        print(key)


def list_keys(*, home: Path | None = None, as_json: AsJson = False) -> None:
    """Show the names and quotas of the keys. Their use since the gateway started is in swarm-node status --json, as
    work.clients.

    Parameters
    ----------
    home
        The seed's SWARM_HOME.
    """
    keys = read_keys(_path(home)) or []
    if as_json:
        fields = ("requests_per_minute", "tokens_per_minute", "in_flight")
        print_json([{"name": k.name, "made": k.made} | {f: getattr(k.quota, f) for f in fields} for k in keys])
        return
    if not keys:
        print("There is no key. Make one: swarm-node gateway key add NAME")
    for key in keys:
        quota = key.quota
        limits = [
            f"{value:,} {what}"
            for value, what in (
                (quota.requests_per_minute, "requests a minute"),
                (quota.tokens_per_minute, "tokens a minute"),
                (quota.in_flight, "sequences in flight"),
            )
            if value
        ]
        made = time.strftime("%Y-%m-%d", time.localtime(key.made))
        print(f"{key.name}  {made}  {', '.join(limits) or 'no limit'}")


def remove(name: str, /, *, home: Path | None = None) -> None:
    """Remove a key: its client gets 401 from now on. Its requests in flight are still answered.

    Parameters
    ----------
    name
        As in swarm-node gateway key list.
    home
        The seed's SWARM_HOME.
    """
    remove_key(_path(home), name)
    print(f"{name} is removed.")


def _path(home: Path | None) -> Path:
    return (home or default_home()).expanduser().absolute() / KEYS_FILE


def register(gateway: App) -> None:
    key = App(name="key", help="Make, list and remove the keys of the gateway's clients.", help_epilogue="")
    offer(
        key,
        add,
        None,
        "swarm-node gateway key add anna",
        "swarm-node gateway key add anna --requests-per-minute 60 --tokens-per-minute 100000 --in-flight 16",
    )
    key.command(list_keys, name="list", help=list_keys.__doc__)
    offer(key, remove, None, "swarm-node gateway key remove anna")
    gateway.command(key)
