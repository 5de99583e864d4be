"""The command line: `app` parses, calls, and turns errors into sentences and exit codes.

One module for each group of commands. Each imports what it needs when it runs, so `--help` stays fast. What a
command does is in `node.coordinator`, `node.member` and `node.tools`.

Modules:

- `app`: `swarm-node`
- `asking`: Asking the seed that runs on this machine; and whom of its members a person means
- `authority`: Commands of whoever runs the trainer
- `hidden`: Keeps secrets out of the list of processes, which every user of a machine can read
- `lifetime`: How long a command lives
- `member`: Commands of whoever lends a machine
- `removal`: Commands that show somebody out
- `report`: What every command has
- `watch`: Commands that show
- `weights`: Commands on checkpoints, for which no swarm is needed
- `work`: Commands about work
"""


def main() -> None:
    """The console script `swarm-node`. The commands are imported here, and not with the package."""
    from node.cli.app import main as run_command_line

    run_command_line()
