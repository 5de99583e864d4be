#!/bin/sh
# Starts swarm-node in the image:
#
#   docker run -e TICKET=swarm1... IMAGE                    joins
#   docker run -e TICKET=swarm1... IMAGE --engine none      joins, with these flags
#   docker run -e TICKET=swarm1... IMAGE relay              any other command of swarm-node
#   docker run -it IMAGE sh                                 a shell
#
# The ticket comes from TICKET. Root (as on-start scripts of rented machines run) becomes the user swarm.
set -eu
SWARM_NODE=${SWARM_NODE:-/opt/swarm-node/.venv/bin/swarm-node}
: "${SWARM_HOME:=/data}" "${SWARM_CACHE:=/opt/swarm-node/.cache}"
export SWARM_HOME SWARM_CACHE

if [ -n "${TICKET:-}" ]; then
    SWARM_TICKET=$TICKET
    export SWARM_TICKET
fi
unset TICKET

case ${1:-} in
sh | bash) exec "$@" ;;
swarm-node)
    shift
    [ $# -gt 0 ] || set -- --help
    ;;
esac
case ${1:-} in
--help | -h | --version) ;;
"" | -*) set -- join "$@" ;;
esac

if [ "$(id -u)" = 0 ]; then
    mkdir -p "$SWARM_HOME"
    chown swarm:swarm "$SWARM_HOME"
    HOME=/home/swarm
    export HOME
    exec setpriv --reuid=swarm --regid=swarm --init-groups --no-new-privs "$SWARM_NODE" "$@"
fi
exec "$SWARM_NODE" "$@"
