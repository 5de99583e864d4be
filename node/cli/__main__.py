"""`python -m node.cli`: the same as `swarm-node`."""

from node.cli import main

if __name__ == "__main__":
    main()
