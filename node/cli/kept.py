"""Commands for files that the machines of a council keep: keep, kept."""

import time
from pathlib import Path
from typing import Final

import msgspec
from cyclopts import App

from codec.errors import PeerError, UsageError
from node.cli.report import TRAIN, AsJson, offer, print_json
from node.settings.config import default_home

__all__ = ["register"]

_WITHIN_S: Final = 3600.0


def keep(file: Path, /, *, name: str = "", home: Path | None = None, as_json: AsJson = False) -> None:
    """Give a file to every machine of the council: the optimizer's state, for example. Waits until a majority has it.

    The next file of the same name replaces it. It goes over encrypted connections, and your user can read it on each
    machine.

    Parameters
    ----------
    file
        The file to keep.
    name
        Its name; without it, the file's own.
    home
        SWARM_HOME of the machine that leads, which is this one.
    """
    from node.council.kept import KEEP_REQUEST, KeptFiles, check_name, established
    from node.settings.units import size_text
    from node.status.query import ask
    from node.status.schema import SeedStatus
    from swarm.store.disk import Disk

    folder = (home or default_home()).expanduser().absolute()
    try:
        check_name(name or file.name)
    except PeerError as error:
        raise UsageError(f"--name: {error}.") from error
    if not isinstance(ask(folder), SeedStatus):
        raise UsageError("This machine stands by: run this on the machine that leads.")
    if not (folder / "council.key").exists():
        raise UsageError("This seed has no council that could keep files (swarm-node seed --council).")
    began = time.monotonic()
    kept = KeptFiles(folder).add(file, name or file.name)
    Disk().write_whole(folder / KEEP_REQUEST, msgspec.json.encode((kept.name, kept.digest.hex(), kept.size)))
    while kept not in established(folder):
        ask(folder)  # raises when the seed has ended
        if time.monotonic() - began > _WITHIN_S:
            raise UsageError(
                f"No other machine of the council has taken {kept.name} within {_WITHIN_S / 60:.0f} minutes."
            )
        time.sleep(0.1)
    seconds = time.monotonic() - began
    if as_json:
        print_json({"name": kept.name, "bytes": kept.size, "digest": kept.digest.hex(), "seconds": seconds})
    else:
        print(f"{kept.name}, {size_text(kept.size)}, is on a majority of the council, after {seconds:.1f} s.")


def kept(name: str = "", out: Path | None = None, /, *, home: Path | None = None, as_json: AsJson = False) -> None:
    """Write a file that the council keeps to OUT, every byte verified; or list them.

    Parameters
    ----------
    name
        Its name, as it was kept. Without it, all are listed.
    out
        The file to make.
    home
        SWARM_HOME of any machine of the council.
    """
    from node.council.kept import KeptFiles, established
    from node.settings.units import size_text

    folder = (home or default_home()).expanduser().absolute()
    files, found = KeptFiles(folder), established(folder)
    if not name:
        rows = [{"name": each.name, "bytes": each.size, "here": files.has(each)} for each in found]
        if as_json:
            print_json(rows)
        for row in () if as_json else rows:
            print(f"{row['name']}  {size_text(int(row['bytes']))}{'' if row['here'] else '  not here yet'}")
        return
    wanted = next((each for each in found if each.name == name), None)
    if wanted is None:
        raise UsageError(
            f"The council keeps no {name[:80]!r}; it keeps: {', '.join(e.name for e in found) or 'nothing'}."
        )
    if out is None:
        raise UsageError("Give the file to write, too: swarm-node kept NAME OUT")
    files.copy_out(wanted, out)
    if as_json:
        print_json({"name": wanted.name, "bytes": wanted.size, "digest": wanted.digest.hex(), "file": str(out)})
    else:
        print(f"{out}: {size_text(wanted.size)}, verified.")


def register(app: App) -> None:
    offer(app, keep, TRAIN, "swarm-node keep runs/optimizer.pt", "swarm-node keep runs/step_17.pt --name optimizer")
    offer(app, kept, TRAIN, "swarm-node kept", "swarm-node kept optimizer optimizer.pt")
