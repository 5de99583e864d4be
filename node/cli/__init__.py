"""The command line: `app` parses it, calls the command, and turns errors into sentences and exit codes.

One module for each group of commands. Each imports what it needs when it runs, so `--help` stays fast. What a
command does is in `node.coordinator`, `node.member` and `node.tools`.

Modules:

- `app`: `swarm-node`
- `asking`: How a command asks the seed of this machine, and finds the member that a person named
- `authority`: Commands on the trainer's machine
- `completion`: Completion of commands and flags in shells
- `config`: Commands about settings
- `doctor`: The command doctor
- `hidden`: Keeps secrets out of the list of processes
- `kept`: keep, kept
- `lifetime`: How long a command lives
- `member`: Commands on a rollout machine
- `removal`: Commands that remove members
- `replay`: The command replay
- `report`: What every command shares: its place in the help, its examples, its JSON
- `sleep`: The commands sleep and wake
- `standby`: standby, takeover, council-id, rescue
- `watch`: Commands that show something
- `weights`: Commands on checkpoints, without a swarm
- `work`: Commands about work
"""


def main() -> None:
    """The console script `swarm-node`. Imports the commands here, so that importing the package stays fast."""
    import gc

    gc.disable()  # what is imported is no garbage: searching it takes a tenth of a short command's time
    from node.cli.app import main as run_command_line

    gc.freeze()
    gc.enable()
    run_command_line()
