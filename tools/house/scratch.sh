#!/usr/bin/env bash
# Tries the codemod on a fresh clone: tools/house/scratch.sh FOLDER
set -euo pipefail
rm -rf "$1"
git clone -q "$(git rev-parse --show-toplevel)" "$1"
ln -s "$(readlink -f .venv)" "$1/.venv"; echo .venv >> "$1/.git/info/exclude"
