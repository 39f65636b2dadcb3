#!/bin/bash
# Joins this container to the Ray cluster at SHARDWRIGHT_RAY_ADDRESS, as a node that takes no work
# itself, and serves. Ends where either ends, so that the container is started anew.
set -euo pipefail

ray start --address "$SHARDWRIGHT_RAY_ADDRESS" --num-cpus 0

stopping=""
shardwright serve &
server=$!
trap 'stopping=yes; kill -TERM "$server"' TERM INT

node_is_alive() {
    grep --quiet --no-messages '^raylet$' /proc/[0-9]*/comm
}
while node_is_alive; do sleep 5; done &
node=$!

ended=0
wait -n "$server" "$node" || ended=$?
if [ -z "$stopping" ] && kill -0 "$server" 2>/dev/null; then
    echo "error: the Ray node has ended" >&2
    kill -TERM "$server"
    wait "$server" || true
    exit 1
fi
kill "$node" 2>/dev/null || true
# A signal interrupts the first wait, before the server has ended.
wait "$server" 2>/dev/null || ended=$?
exit "$ended"
