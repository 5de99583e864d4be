#!/usr/bin/env bash
# Tries both codemods on a fresh clone of this commit, one commit each: tools/house/scratch.sh FOLDER
set -euo pipefail
folder=$(realpath -m "$1")
rm -rf "$folder"
git clone -q "$(git rev-parse --show-toplevel)" "$folder"
ln -s "$(readlink -f .venv)" "$folder/.venv"
cd "$folder"
echo .venv >> .git/info/exclude
export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="$PWD"
for step in moves renames; do
    python -m tools.house.$step
    git commit -qm "tools.house.$step"
done
