"""Lets this folder's tests share `plain_formats`, and `codec_kit` of the folder above."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
