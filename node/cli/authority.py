"""Commands on the trainer's machine: keygen, seed, invite, rotate-key, publish."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from codec.errors import UsageError
from node.cli.report import TRAIN, AsJson, offer, print_json
from node.settings import keyfile
from node.settings.config import InviteConfig, SeedConfig, default_home
from swarm.transport.left_out import leave_out

__all__ = ["register"]


def keygen(*, out: Path | None = None, home: Path | None = None, as_json: AsJson = False) -> None:
    """Make the key of a new swarm, and print its PeerId.

    A person who has this file controls the swarm: keep it on the trainer's machine, and a copy where you keep secrets.

    Parameters
    ----------
    out
        File to make. Default: SWARM_HOME/authority.key, which seed and invite use.
    home
        SWARM_HOME, if --out is not given.
    """
    from codec.sign import Key  # here: publish, which imports this module too, loads no cryptography
    from swarm.transport.identity import peer_id

    path = out or (home or default_home()) / keyfile.AUTHORITY_KEY
    key = Key.generate()
    keyfile.write(path, key)
    if as_json:
        print_json({"peer_id": peer_id(key.public), "public_key": key.public.hex(), "file": str(path)})
    else:
        print(peer_id(key.public))
        print(f"The key is in {path}; only your user can read it.", file=sys.stderr)


async def seed(*, config: Annotated[SeedConfig | None, Parameter(name="*")] = None) -> None:
    """Run the swarm's seed beside the trainer, until interrupted.

    The seed holds the key, admits nodes that show a ticket, and sends each version that is published to it. If nodes
    cannot dial this machine, name a relay that they can dial (--via): the tickets then lead through that relay.
    """
    leave_out()
    from node.cli.lifetime import owner_only, until_signalled
    from node.coordinator.coordinator import run

    owner_only()
    await until_signalled(partial(run, config or SeedConfig()))


def invite(*, config: Annotated[InviteConfig, Parameter(name="*")] = InviteConfig(), as_json: AsJson = False) -> None:
    """Print a ticket: everything that a machine needs to join, as one string.

    A machine with a ticket can fetch the policy until the ticket expires, so send it as you would a password.
    """
    from node.settings.contact import Contact, only_near
    from node.settings.ticket import Ticket
    from swarm.protocol.core.documents import Capability, seal

    key = keyfile.load(config.key or config.home / keyfile.AUTHORITY_KEY)
    contact = Contact.read(config.home)
    if contact.authority != key.public:
        raise UsageError(
            f"The seed of {config.home} runs with another key, which would not accept this ticket. "
            "Give its key file with --key, or its folder with --home."
        )
    expires = time.time() + config.expires_s
    quota_bytes = round(config.quota_gb * 1e9)
    capability = Capability(key.public, os.urandom(16), expires, config.nodes, quota_bytes, config.nodes_ever)
    addrs = config.announce or contact.addrs
    ticket = Ticket(key.public, addrs, seal(capability, key), contact.preset)
    if as_json:
        print_json({"ticket": str(ticket), "expires": expires, "nodes": config.nodes, "addrs": list(ticket.addrs)})
        return
    print(ticket)
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(expires))
    ever = f" ({config.nodes_ever} different ones)" * bool(config.nodes_ever)
    print(f"For {config.nodes} machines at a time{ever}, until {until}: swarm-node join TICKET", file=sys.stderr)
    if only_near(addrs):
        print(
            f"It leads to {', '.join(addrs)}, which only nearby machines can reach. For other machines, start the seed "
            "with --announce HOST:PORT, its address on the internet, or with --via and a relay that they can reach.",
            file=sys.stderr,
        )


def rotate_key(
    *,
    home: Path | None = None,
    key: Path | None = None,
    out: Path | None = None,
    expires: str = "30d",
    as_json: AsJson = False,
) -> None:
    """Give the swarm a new key; its members follow by themselves. For the case that the old key may be known to others.

    Stop the seed first. The old key signs its successor; the new swarm begins with the weights of the newest version.
    Then start the seed as before, at the same address: it first tells the members of the old swarm, which keep their
    copy of the model and join the new one. Tickets of the old swarm stop working: make new ones.

    Parameters
    ----------
    home
        The seed's SWARM_HOME.
    key
        The old key's file, if it is not the one in SWARM_HOME.
    out
        The new key's file, required with --key; give it to the seed with --key.
    expires
        How long members that are away now can follow: 24h, 30d.
    """
    from node.cli.lifetime import owner_only
    from node.coordinator.rotation import rotate
    from node.settings.addresses import duration_s
    from swarm.transport.identity import peer_id

    owner_only()
    done = rotate((home or default_home()).expanduser().absolute(), key, out, duration_s(expires))
    if as_json:
        print_json({
            "old_peer_id": peer_id(done.old), "peer_id": peer_id(done.new), "public_key": done.new.hex(),
            "file": str(done.new_key), "old_file": str(done.old_key), "ticket": done.ticket.hex(),
            "machines": done.peers, "version": list(done.version),
        })  # fmt: skip
        return
    print(peer_id(done.new))
    print(
        f"The new key is in {done.new_key}: copy it to where you keep secrets. Start the seed as before; {done.peers} "
        f"machines may follow. The old key, {done.old_key}, is needed until the seed says handed_over.",
        file=sys.stderr,
    )


def publish(
    folder: Path,
    /,
    *,
    home: Path | None = None,
    step: int = 0,
    wait: bool = False,
    raw: bool = False,
    adapter: str = "",
    draft: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint folder, or an adapter, as the next version, through the seed that runs on this machine.

    Parameters
    ----------
    folder
        Hugging Face folder (safetensors, of any sharding) of the same model as the seed's base; with --adapter, a
        folder that peft's save_pretrained wrote.
    home
        The seed's SWARM_HOME.
    step
        Your own step number, for logs and reports.
    wait
        Wait until every live node holds the version; without it, only until it is sealed.
    raw
        FOLDER is any file, and the seed was started with --raw-mb.
    adapter
        Publish FOLDER as the adapter of this name, new or known; the seed was started with --adapters. FOLDER has a
        plain LoRA adapter of the seed's base: adapter_config.json and adapter_model.safetensors. The base and other
        adapters stay as they are.
    draft
        Folder with new weights of the draft model, which become part of the same version; the seed was started with
        --draft. Without it the draft stays as it is.
    """
    if draft is not None and (raw or adapter):
        raise UsageError("--draft goes with the base: leave out --adapter and --raw.")
    if adapter:
        if raw:
            raise UsageError("--adapter and --raw exclude each other: a file is no adapter.")
        _publish_adapter(folder, home or default_home(), adapter, step=step, wait=wait, as_json=as_json)
        return
    import gc

    from node.settings.memory import give_back_promptly

    give_back_promptly()
    gc.disable()  # what is imported here is no garbage, and searching it would take a fifth of a short process's time

    from node.settings.units import size_text
    from node.status.progress import ProgressLine
    from node.trainers.publish_files import publish_file, publish_folder

    gc.freeze()
    gc.enable()
    with ProgressLine(f"Publishing {folder.name}"):
        at = home or default_home()
        if raw:
            report = publish_file(at, folder, step=step, everywhere=wait)
        else:
            report = publish_folder(at, folder, step=step, everywhere=wait, draft=draft)
    gc.freeze()  # nor is it searched at the end
    if as_json:
        print_json(report)
        return
    density = 100 * report["density"]
    print(f"Version {report['version']}: {density:.3g} % changed, {size_text(report['delta_bytes'])} on the wire.")


def _publish_adapter(folder: Path, home: Path, adapter: str, *, step: int, wait: bool, as_json: bool) -> None:
    from node.settings.units import size_text
    from node.status.progress import ProgressLine
    from node.trainers.publish_adapter import publish_adapter

    with ProgressLine(f"Publishing {folder.name}"):
        report = publish_adapter(home, folder, adapter, step=step, everywhere=wait)
    if as_json:
        print_json(report)
        return
    print(
        f"Version {report['version']}: adapter {adapter} version {report['adapter_version']}, "
        f"{100 * report['density']:.3g} % changed, {size_text(report['delta_bytes'])} on the wire."
    )


def adapters(*, home: Path | None = None, as_json: AsJson = False) -> None:
    """List the adapters of the swarm whose seed runs on this machine.

    Parameters
    ----------
    home
        The seed's SWARM_HOME.
    """
    from msgspec import to_builtins

    from node.trainers.publish_adapter import list_adapters

    found = list_adapters(home or default_home())
    if as_json:
        print_json({"slots": found.slots, "rank": found.rank, "adapters": to_builtins(found.adapters)})
        return
    for row in found.adapters:
        training = ", a trainer publishes it" if row.attached else ""
        print(f"{row.name}  version {row.version}, rank {row.rank}, {row.modules} modules, slot {row.slot}{training}")
    print(f"{len(found.adapters)} of {found.slots} slots are in use; they have room for rank {found.rank}.")


def remove_adapter(name: str, /, *, home: Path | None = None, as_json: AsJson = False) -> None:
    """Remove an adapter from the swarm: a version in which its slot is empty, and free for another.

    Refused while a trainer publishes the adapter. Samples of it that are on their way are refused from then on.

    Parameters
    ----------
    name
        The adapter's name, as it was given to publish.
    home
        The seed's SWARM_HOME.
    """
    from node.trainers.publish_adapter import remove_adapter as remove

    done = remove(home or default_home(), name)
    if as_json:
        print_json(
            {"adapter": name, "epoch": done.epoch, "version": done.version, "root": done.root.hex(),
             "delta_bytes": done.delta_bytes}
        )  # fmt: skip
        return
    print(f"Version {done.version}: without the adapter {name}.")


def register(app: App) -> None:
    offer(app, keygen, TRAIN, "swarm-node keygen", "swarm-node keygen --out ~/secrets/policy.key")
    offer(
        app,
        seed,
        TRAIN,
        "swarm-node seed --base ~/models/Qwen3-8B",
        "swarm-node seed --base . --listen 4001 --announce 203.0.113.7:31001 --up-mbit 900",
        "swarm-node seed --base ~/models/Qwen3-8B --via 203.0.113.9:4001    (swarm-node relay TICKET runs there)",
        "swarm-node seed --base runs/step_0 --watch runs --watch-marker STABLE",
        "swarm-node seed --base ~/models/Qwen3-8B --egress-copies 1.1",
        "swarm-node seed --base ~/models/Qwen3-8B --draft ~/models/Qwen3-0.6B",
        "swarm-node seed --raw-mb 512",
    )
    offer(app, invite, TRAIN, "swarm-node invite", "swarm-node invite --expires 7d --nodes 100 --quota-gb 500 --json",
          "swarm-node invite --nodes 1 --nodes-ever 1                (for one machine and no other)")  # fmt: skip
    offer(
        app,
        rotate_key,
        TRAIN,
        "swarm-node rotate-key",
        "swarm-node rotate-key --key ~/secrets/policy.key --out ~/secrets/policy-2.key",
    )
    offer(
        app,
        publish,
        TRAIN,
        "swarm-node publish runs/step_17",
        "swarm-node publish runs/step_17 --wait --json",
        "swarm-node publish --raw data.tar.zst --wait",
        "swarm-node publish runs/adapter_17 --adapter math --wait",
        "swarm-node publish runs/step_17 --draft runs/draft_17",
    )
    offer(app, adapters, TRAIN, "swarm-node adapters", "swarm-node adapters --json")
    offer(app, remove_adapter, TRAIN, "swarm-node remove-adapter math", "swarm-node remove-adapter math --json")
