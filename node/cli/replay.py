"""The command replay: a sample drawn again, or a bundle of it for a third person."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from codec.errors import PeerError, UsageError
from node.cli.report import SEE, AsJson, offer, print_json
from node.settings.config import default_home

if TYPE_CHECKING:
    from node.engines.replay import Replayed
    from node.ledger.bundle import OpenSample, SampleBundle

__all__ = ["register"]

_LISTED: Final = 20


def replay(
    sample: str = "",
    /,
    *,
    weights: Annotated[tuple[Path, ...], Parameter(negative=())] = (),
    out: Path | None = None,
    arithmetic: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    device: str | None = None,
    threads: int | None = None,
    home: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Draw an accepted sample again, token by token, from the weights that it was drawn from; or list samples.

    On a machine that computes as the node did (transformers, the same dtype, device and threads), tokens and
    log-probabilities are the same bits. With portable draws (SamplingOptions) the tokens are the same for every engine,
    except where two are nearly tied. Nothing runs in the swarm, and the seed may go on meanwhile.

    With --out, write the sample to a file instead: what was asked, the answer, and the signatures of the node and of
    the swarm. Whoever has that file and the weights can replay it without the swarm: swarm-node replay FILE --weights
    FOLDER.

    Parameters
    ----------
    sample
        GROUP/NUMBER as in the list (the beginning of GROUP is enough), or a file that --out wrote. Without it, the
        samples that were accepted last are listed.
    weights
        A checkpoint folder of a version that drew tokens; one for each. Without it, the versions that the home keeps.
    out
        The file to write.
    arithmetic
        The dtype in which the model computes; auto as in swarm-node join.
    device
        Its name in torch, such as cuda or cpu. Without it, a GPU if there is one.
    threads
        CPU threads of torch.
    home
        The seed's SWARM_HOME; for a file, also a node's.
    """
    folder = (home or default_home()).expanduser().absolute()
    if not sample:
        _list(folder, as_json)
        return 0
    bundle = _bundle(sample, folder)
    try:
        opened = bundle.open()
    except PeerError as error:
        raise UsageError(f"{sample} proves nothing: {error}.") from error
    if out is not None:
        _write(out, bundle, opened, as_json)
        return 0
    from swarm.transport.identity import peer_id

    found = _draw_again(opened, weights, arithmetic, device, threads, folder)
    if as_json:
        print_json({"sample": opened.name, "node": peer_id(bundle.node)} | found.to_dict())
    else:
        print(_sentence(opened, found))
    return 0 if found.first_difference is None else 1


def _bundle(sample: str, home: Path) -> "SampleBundle":
    from node.coordinator.samples import bundle_of
    from node.ledger.bundle import MAX_BUNDLE_BYTES, SampleBundle

    group, slash, number = sample.partition("/")
    if slash and number.isdecimal() and group and all(digit in "0123456789abcdef" for digit in group.lower()):
        return bundle_of(home, group, int(number))
    path = Path(sample).expanduser()
    try:
        with open(path, "rb") as file:
            return SampleBundle.decode(file.read(MAX_BUNDLE_BYTES + 1))
    except OSError as error:
        raise UsageError(f"{sample} is neither GROUP/NUMBER nor a file that can be read: {error.strerror}.") from error
    except PeerError as error:
        raise UsageError(f"{sample} is no file of swarm-node replay --out: {error}.") from error


def _draw_again(
    opened: "OpenSample",
    folders: tuple[Path, ...],
    arithmetic: Literal["auto", "bfloat16", "float16", "float32"],
    device: str | None,
    threads: int | None,
    home: Path,
) -> "Replayed":
    from node.settings.extras import how_to_get, lacking

    if opened.bundle.sampling.extra.images:
        raise UsageError(f"{opened.name} was drawn after images, which are not kept: it cannot be drawn again.")
    if missing := lacking(("torch", "transformers")):
        raise UsageError(f"replay needs {' and '.join(missing)}: {how_to_get('torch')}")
    from codec.parts import base_layout
    from node.coordinator.samples import weights_of
    from node.engines.replay import draw_again
    from node.engines.transformers import TransformersEngine
    from node.status.progress import ProgressLine

    with (
        ProgressLine(f"Drawing {opened.rollout.length} tokens again"),
        weights_of(opened, folders, home) as found,
    ):
        engine = TransformersEngine(threads=threads, device=device, arithmetic=arithmetic)
        return draw_again(
            engine,
            found.model,
            base_layout(opened.layout),
            found.by_version,
            opened.question,
            opened.bundle.sampling,
            opened.answer,
        )


def _sentence(opened: "OpenSample", found: "Replayed") -> str:
    from node.settings.units import version_text

    versions = ", ".join(version_text((span.epoch, span.version)) for span in opened.rollout.spans)
    if found.exact:
        return f"{opened.name}: all {found.tokens} tokens and log-probabilities are the same bits (version {versions})."
    off = f"log-probabilities differ by {found.logprob_off:.2g} nats at most"
    if found.first_difference is None:
        return f"{opened.name}: all {found.tokens} tokens are the same (version {versions}); {off}."
    lines = [
        f"{opened.name}: token {found.first_difference} of {found.tokens} is another one (version {versions}); before "
        f"it, {off}."
    ]
    if not opened.bundle.sampling.extra.portable and opened.bundle.sampling.temperature > 0:
        lines.append(
            "It was not drawn with portable draws, so only the node's own kind of engine draws the same tokens."
        )
    return "\n".join(lines)


def _write(out: Path, bundle: "SampleBundle", opened: "OpenSample", as_json: bool) -> None:
    data = bundle.encode()
    try:
        out.write_bytes(data)
    except OSError as error:
        raise UsageError(f"Cannot write {out}: {error.strerror}.") from error
    if as_json:
        print_json({"sample": opened.name, "file": str(out), "bytes": len(data)})
    else:
        print(f"{out}: {opened.name}, {len(data):,} bytes, with the signatures of its node and of the swarm.")


def _list(home: Path, as_json: bool) -> None:
    from node.coordinator.samples import accepted_samples
    from node.settings.units import version_text
    from swarm.transport.identity import peer_id

    rows: list[dict[str, Any]] = []
    for found in accepted_samples(home, _LISTED):
        rollout = found.rollout
        rows.append({
            "sample": found.name,
            "node": peer_id(found.node),
            "tokens": rollout.length,
            "oldest": list(rollout.oldest),
            "portable": found.leased.extra.portable,
        })  # fmt: skip
    if as_json:
        print_json(rows)
        return
    if not rows:
        print("The ledger has no accepted sample yet.")
    for row in rows:
        version = version_text(row["oldest"])
        drawn = "  portable draws" if row["portable"] else ""
        print(f"{row['sample']:38} {row['tokens']:6} tokens  version {version}  node ..{row['node'][-8:]}{drawn}")


def register(app: App) -> None:
    offer(
        app,
        replay,
        SEE,
        "swarm-node replay",
        "swarm-node replay 3f0a91/2",
        "swarm-node replay 3f0a91/2 --out sample.bin",
        "swarm-node replay sample.bin --weights ~/checkpoints/step-120 --json",
    )
