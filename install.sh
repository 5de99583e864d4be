#!/bin/sh
# Makes .venv and installs swarm-node into it: what `make install` runs.
#   EXTRAS  which extras, default "torch,test"; EXTRAS=none leaves torch out (enough for relay, seed and delta)
#   TORCH   what to ask pip for, default the release in requirements.lock (the tested one)
#   PYTHON  which interpreter, default the newest of 3.13, 3.12 and 3.11 that is here
# It remembers in .venv/.installed what it was asked for. Asked for more, it adds to that; with nothing new to install it
# returns at once; when the lock file has changed, it installs all of it again.
set -eu
cd "$(dirname "$0")"
VENV=${VENV:-.venv}
RECORD=$VENV/.installed

say() { printf '%s\n' "$*" >&2; }

usable() {  # Python 3.11 or later that can make an environment (Debian ships venv apart)
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if usable "$candidate"; then echo "$candidate"; return; fi
    done
    say "swarm-node needs Python 3.11 or later with venv: apt-get install python3 python3-venv (Debian, Ubuntu)," \
        "dnf install python3 (Fedora) or brew install python@3.13 (macOS), or name one with PYTHON=..."
    exit 1
}

# One dependency of libp2p is a C extension: find out now, and not after minutes of pip, whether it will build.
check_headers() {
    include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    lacks=
    command -v cc >/dev/null || lacks="a C compiler"
    for header in Python.h gmp.h; do
        if [ -n "$lacks" ]; then break; fi
        printf '#include <%s>\n' "$header" | cc -E ${CPPFLAGS:-} -I"$include" - >/dev/null 2>&1 || lacks="the header $header"
    done
    if [ -z "$lacks" ]; then return; fi
    say "libp2p needs $lacks to build: apt-get install build-essential python3-dev libgmp-dev (Debian, Ubuntu)," \
        "dnf install gcc python3-devel gmp-devel (Fedora) or brew install gmp (macOS), then try again."
    exit 1
}

same_python() {  # the prefix of an environment differs from that of the Python which made it; their base does not
    base='import sys; print(sys.base_prefix, sys.version_info[:2])'
    [ "$("$1" -c "$base")" = "$("$2" -c "$base")" ]
}

recorded() { sed -n "s/^$1 //p" "$RECORD" 2>/dev/null || true; }

# What was asked for before stays: a plain `make test` must not put another build of torch in place of the chosen one.
asked=$(echo "${EXTRAS:-}" | tr ', ' '\n\n' | sed 's/^none$/core/')
before=$(recorded groups | tr ' ' '\n')
groups=$(printf '%s\n' core "${asked:-$(if [ -z "$before" ]; then printf 'test\ntorch'; fi)}" "$before" | sort -u | xargs)
TORCH=${TORCH:-$(recorded torch)}
choices=$(printf 'groups %s\ntorch %s' "$groups" "$TORCH")
sums=$(cksum pyproject.toml requirements.lock install.sh tools/pins.py)

if [ -x "$VENV/bin/python" ]; then
    if [ -n "${PYTHON:-}" ] && ! same_python "$(find_python)" "$VENV/bin/python"; then
        say "$VENV was made with $("$VENV/bin/python" --version), and PYTHON=$PYTHON is another one: run 'make clean'" \
            "first."
        exit 1
    fi
    if [ "$(cat "$RECORD" 2>/dev/null)" = "$choices
$sums" ]; then exit 0; fi
    check_headers "$VENV/bin/python"
else
    python=$(find_python)
    check_headers "$python"
    "$python" -m venv "$VENV"
fi
pip_install() { "$VENV/bin/python" -m pip --disable-pip-version-check install -q --no-compile "$@"; }

# Everything comes from requirements.lock, at its tested version, and pip refuses a file that has not one of the hashes
# there. What builds comes first and from the lock too, since pip verifies nothing in the environments that it makes for
# builds. Only torch stands apart, with the CUDA parts that it brings: each machine wants its own build of it.
locked() {
    torch=$("$VENV/bin/python" tools/pins.py "$VENV" "$@")
    pip_install --no-deps --require-hashes --no-build-isolation -r "$VENV/requirements.txt"
}
locked build
locked $groups
printf '%s\n' "$choices" > "$RECORD"  # without the sums: if what follows fails, the next call starts again
if [ -n "$torch" ]; then pip_install -c "$VENV/constraints.txt" "${TORCH:-$torch}"; fi
# Whatever is still missing is not in the lock file; without an index pip says so instead of fetching it unverified.
extras=$(echo "$groups" | xargs -n 1 | grep -vx core | paste -sd , -) || true
pip_install --no-index --no-build-isolation -c "$VENV/constraints.txt" -e ".${extras:+[$extras]}" || {
    say "What pyproject.toml asks for is not what requirements.lock holds: run 'make lock', then try again."
    exit 1
}
# trio has types of its own; a dependency of libp2p brings stubs of an old trio that would shadow them.
rm -rf "$VENV"/lib/python*/site-packages/trio-stubs
# pip would compile on one core. Of some packages, files for other versions of Python do not compile; pip ignores that, too.
"$VENV/bin/python" -m compileall -qq -j 0 "$VENV"/lib/python*/site-packages || true
printf '%s\n' "$sums" >> "$RECORD"
say "Installed: $VENV/bin/swarm-node --help"
