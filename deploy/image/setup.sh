#!/bin/sh
# The steps of the image, as root, on Debian: "build" installs into /opt/swarm-node, "run" makes what is installed run.
# Apart from the Dockerfile so that a test can take them in any root folder.
set -eu
ROOT=/opt/swarm-node
export DEBIAN_FRONTEND=noninteractive

packages() {
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/*
}

case ${1:-} in
build)
    packages build-essential ca-certificates libgmp-dev make python3-dev python3-venv
    cd $ROOT
    rm -rf .venv
    PIP_NO_CACHE_DIR=1 ./install.sh
    # Kernels are compiled here, once, and not for 20 s on each machine.
    SWARM_CACHE=$ROOT/.cache .venv/bin/python -c 'from codec.bits import DTYPES
from codec.kernels.jit import cache_folder
from codec.rice import warm_up
for name in ("BF16", "F32"):
    warm_up(DTYPES[name])
    (cache_folder() / f"compiled-{name}").touch()'
    ;;
run)
    packages ca-certificates libgmp10 python3
    useradd --uid 1000 --create-home --home-dir /home/swarm --shell /usr/sbin/nologin swarm
    mkdir -p /data /ticket /tokens  # /ticket, /tokens: where compose hands over the ticket, and the metrics' tokens
    chown swarm:swarm /data /ticket /tokens
    chmod 700 /data /ticket /tokens
    # The compiled kernels have to belong to the user that executes them.
    chown -R swarm:swarm $ROOT/.cache
    chmod -R go-w $ROOT/.cache
    ;;
*)
    echo "setup.sh build, or setup.sh run" >&2
    exit 2
    ;;
esac
