"""The command completion: prints the script by which a shell completes commands and flags."""

import sys
from typing import Final, Literal

from cyclopts import App

from node.cli.report import SEE, offer

__all__ = ["register"]

Shell = Literal["bash", "zsh", "fish"]
_PLACES: Final = {
    "bash": "~/.local/share/bash-completion/completions/swarm-node",
    "zsh": "a folder of $fpath, as _swarm-node",
    "fish": "~/.config/fish/completions/swarm-node.fish",
}


def register(app: App) -> None:
    def completion(shell: Shell, /) -> None:
        """Print the completion of commands and flags for a shell.

        Parameters
        ----------
        shell
            bash, zsh or fish.
        """
        sys.stdout.write(app.generate_completion(prog_name="swarm-node", shell=shell))
        if sys.stdout.isatty():
            print(f"For every new shell, write it to {_PLACES[shell]}.", file=sys.stderr)

    offer(
        app,
        completion,
        SEE,
        'eval "$(swarm-node completion bash)"                      (in ~/.bashrc)',
        "swarm-node completion zsh > ~/.zfunc/_swarm-node           (with fpath+=~/.zfunc before compinit)",
        "swarm-node completion fish > ~/.config/fish/completions/swarm-node.fish",
    )
