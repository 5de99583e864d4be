"""Which samples are drawn, and which checkers read them; kept in the folder of the steps and drawn only once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from scenarios.verification.models import FORMATS, Versions
from scenarios.verification.samples import Checker, collect

__all__ = [
    "DRAWN_BY_VLLM",
    "KINDS_OF_SAMPLES",
    "OTHER_CLASS",
    "OWN_DTYPE",
    "Wanted",
    "make_records",
    "record_file",
]

OTHER_CLASS: Final = {"bf16": "f32", "f32": "bf16", "vllm": "f32"}
"""By author, the dtype of transformers that is not the author's."""
OWN_DTYPE: Final = {"bf16": "bf16", "f32": "f32", "vllm": "bf16"}
"""By author, the dtype in which it draws."""
DRAWN_BY_VLLM: Final = ("honest", "stale", "best_of_two", "replayed")
"""Kinds of samples that need no other model of the node's than the one that draws."""


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

    `author`: the dtype in which nodes draw with transformers, or "vllm". Four models are in memory, and a fifth one for
    a quantised node or a vLLM.
    """
    missing = [kind for kind in wanted if not files(kind.attack).exists()]
    if not missing:
        return
    own, other = OWN_DTYPE[author], OTHER_CLASS[author]
    models: dict[tuple[str, bool], Any] = {}
    for stale in (True, False):  # ascending versions, so that no step is applied twice
        for name in (own, other):
            models[name, stale] = versions.model(version - stale, name)
    for kind in missing:
        stale = kind.attack == "stale"
        checkers = {f"{own}_v": Checker(models[own, False], with_margins=True)}
        if kind.previous:
            checkers[f"{own}_prev"] = Checker(models[own, True])
        if author != "vllm":
            checkers["replay_v"] = Checker(models[own, False], replay=True, with_margins=True)
        if author != "vllm" and kind.previous:
            checkers["replay_prev"] = Checker(models[own, True], replay=True)
        if kind.other:
            checkers[f"{other}_v"] = Checker(models[other, False])
        if kind.other and kind.previous:
            checkers[f"{other}_prev"] = Checker(models[other, True])
        count = max(1, round(samples * kind.share))
        seed = sum(map(ord, kind.attack))
        with _drawer(versions, version, author, kind.attack, models[own, stale]) as drawer:
            claimer = models[own, True] if kind.attack == "claims" else drawer
            record = collect((drawer, claimer), task, kind.attack, count, checkers, seed=seed, threads=threads, say=say)
        files(kind.attack).parent.mkdir(parents=True, exist_ok=True)
        record.save(files(kind.attack))


@contextmanager
def _drawer(versions: Versions, version: int, author: str, attack: str, model: Any) -> Iterator[Any]:
    """What draws: `model`, a quantised one, or a vLLM of the version."""
    if author == "vllm":
        from scenarios.verification.vllm_author import vllm_author

        with vllm_author(versions, version - (attack == "stale")) as drawer:
            yield drawer
    else:
        yield versions.model(version, author, attack) if attack in FORMATS else model
