"""Publishes the checkpoint folders whose names it reads, line by line: a trainer that need not start each time."""

import json
import sys
from pathlib import Path

from node.trainers.publish_files import publish_folder

if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(publish_folder(Path(sys.argv[1]), Path(line.rstrip("\n")))), flush=True)
