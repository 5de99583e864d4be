"""Which samples are drawn, and which checkers read them; kept in the folder of the steps and drawn only once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from scenarios.verification.models import FORMATS, Versions
from scenarios.verification.samples import Checker, collect

__all__ = ["KINDS_OF_SAMPLES", "OTHER_CLASS", "Wanted", "make_records", "record_file"]

OTHER_CLASS: Final = {"bf16": "f32", "f32": "bf16"}


class Wanted(NamedTuple):
    """One kind of samples. `previous`: checkers read it under the version before, too. `other`: a checker of the other
    dtype reads it. `share`: of the samples that the user wants of honest nodes and of those one version behind."""

    attack: str
    previous: bool = False
    other: bool = False
    share: float = 0.5


KINDS_OF_SAMPLES: Final = (
    Wanted("honest", previous=True, other=True, share=1.0),
    Wanted("stale", previous=True, other=True, share=1.0),
    Wanted("claims", previous=True),
    Wanted("best_of_two", share=1.0),
    Wanted("no_end"),
    Wanted("temperature"),
    Wanted("honest_top_p"),
    Wanted("top_p"),
    Wanted("replayed"),
    *(Wanted(form, other=True) for form in FORMATS),
)


def record_file(cache: Path, run: str, version: int, author: str, threads: int, attack: str) -> Path:
    """Where the samples of one kind are kept. `run`: the name of the run's folder."""
    drawn = author if threads == 1 else f"{author}_t{threads}"
    return cache / "records" / f"{run}_v{version}_{drawn}_{attack}.npz"


def make_records(
    versions: Versions,
    task: Any,
    files: Callable[[str], Path],
    version: int,
    author: str,
    samples: int,
    *,
    threads: int = 1,
    wanted: Sequence[Wanted] = KINDS_OF_SAMPLES,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Draw what is missing. `files(attack)`: where it is kept. `threads`: with which the nodes draw; checkers have one.

    `author`: the dtype in which nodes draw. Four models are in memory, and a fifth one for a quantised node.
    """
    missing = [kind for kind in wanted if not files(kind.attack).exists()]
    if not missing:
        return
    other = OTHER_CLASS[author]
    models: dict[tuple[str, bool], Any] = {}
    for stale in (True, False):  # ascending versions, so that no step is applied twice
        for name in (author, other):
            models[name, stale] = versions.model(version - stale, name)
    for kind in missing:
        stale = kind.attack == "stale"
        drawer = versions.model(version, author, kind.attack) if kind.attack in FORMATS else models[author, stale]
        claimer = models[author, True] if kind.attack == "claims" else drawer
        checkers = {
            "replay_v": Checker(models[author, False], replay=True, with_margins=True),
            f"{author}_v": Checker(models[author, False], with_margins=True),
        }
        if kind.previous:
            checkers["replay_prev"] = Checker(models[author, True], replay=True)
            checkers[f"{author}_prev"] = Checker(models[author, True])
        if kind.other:
            checkers[f"{other}_v"] = Checker(models[other, False])
        if kind.other and kind.previous:
            checkers[f"{other}_prev"] = Checker(models[other, True])
        count = max(1, round(samples * kind.share))
        seed = sum(map(ord, kind.attack))
        record = collect((drawer, claimer), task, kind.attack, count, checkers, seed=seed, threads=threads, say=say)
        files(kind.attack).parent.mkdir(parents=True, exist_ok=True)
        record.save(files(kind.attack))
