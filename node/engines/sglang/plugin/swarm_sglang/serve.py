"""Starts SGLang: `python -m swarm_sglang.serve`, with the flags of `sglang.launch_server` and `--rows-alike` (`alike`).

The same module is imported in every process that SGLang starts, so that what it imports is there
(`standins`). On a machine with a GPU it changes nothing.
"""

# pyright: reportMissingImports=false
# SGLang is installed in another environment.

import os
import runpy
import sys

from swarm_sglang.calls import ROWS_ALIKE, ROWS_ALIKE_VARIABLE

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from swarm_sglang.standins import install

    install()

if __name__ == "__main__":
    if ROWS_ALIKE in sys.argv:
        sys.argv.remove(ROWS_ALIKE)  # SGLang does not know it
        os.environ[ROWS_ALIKE_VARIABLE] = "1"
    runpy.run_module("sglang.launch_server", run_name="__main__")
