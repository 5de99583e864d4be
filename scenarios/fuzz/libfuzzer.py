"""The command line and the libFuzzer run (through atheris) that the guided fuzzers share."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from node.settings.extras import how_to_get

__all__ = ["fuzz"]

Target = Callable[[bytes], None]
Corpus = Callable[[Path], None]


def fuzz(about: str | None, packages: Sequence[str], load: Callable[[], tuple[Target, Corpus]]) -> int:
    """Search for inputs that make the target fail, for `--seconds`. Ends the process.

    `load` imports the code under test from `packages`, and returns the target and a function that writes valid inputs
    into a folder. Without atheris the function prints how to install it and returns 2.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="where interesting inputs are kept (default: nowhere)")
    options = parser.parse_args()
    try:
        import atheris  # pyright: ignore[reportMissingModuleSource] - of the extra `fuzz`
    except ImportError:
        print(f"Guided fuzzing needs atheris (Linux): {how_to_get('fuzz')}", file=sys.stderr)
        return 2
    # Its stub leaves this function out.
    with atheris.instrument_imports(include=list(packages)):  # pyright: ignore[reportAttributeAccessIssue]
        one, write_corpus = load()
    folder = options.corpus or Path(tempfile.mkdtemp(prefix="swarm-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder)
    limits = [f"-max_total_time={options.seconds}", f"-seed={options.seed}", "-max_len=4096", "-timeout=5"]
    atheris.Setup([sys.argv[0], str(folder), f"-artifact_prefix={folder}/", "-print_final_stats=1", *limits], one)
    atheris.Fuzz()
    return 0
