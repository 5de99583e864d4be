"""A trainer process that publishes each checkpoint folder whose name it reads on stdin, one name a line."""

import json
import sys
from pathlib import Path

from node.trainers.publish_files import publish_folder

if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(publish_folder(Path(sys.argv[1]), Path(line.rstrip("\n")))), flush=True)
