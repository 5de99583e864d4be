#!/bin/sh
# Makes .venv and installs swarm-node into it: what `make install` runs.
#   EXTRAS  which extras, default "torch,test"; EXTRAS=none leaves torch out (enough for relay, seed and delta)
#   TORCH   what to ask pip for, default torch==2.13.0 (the tested release)
#   PYTHON  which interpreter, default the newest of 3.13, 3.12 and 3.11 that is here
set -eu
cd "$(dirname "$0")"
EXTRAS=${EXTRAS:-torch,test}
TORCH=${TORCH:-torch==2.13.0}
VENV=${VENV:-.venv}

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

python=$(find_python)
check_headers "$python"
if [ ! -x "$VENV/bin/python" ]; then "$python" -m venv "$VENV"; fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# The tested versions of everything; torch stands apart because each machine wants its own build of it.
grep -v '^torch==' constraints.txt > "$VENV/constraints.txt"
case ",$EXTRAS," in
    *,torch,*) pip install -q -c "$VENV/constraints.txt" "$TORCH" ;;
esac
if [ "$EXTRAS" = none ]; then what=.; else what=".[$EXTRAS]"; fi
pip install -q -c "$VENV/constraints.txt" -e "$what"
# trio has types of its own; a dependency of libp2p brings stubs of an old trio that would shadow them.
rm -rf "$VENV"/lib/python*/site-packages/trio-stubs
say "Installed: $VENV/bin/swarm-node --help"
