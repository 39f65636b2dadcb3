#!/bin/bash
# Joins this container to the Ray cluster at SHARDWRIGHT_RAY_ADDRESS, as a node that takes no work
# itself, and serves. Ends where either ends, so that the container is started anew.
set -euo pipefail

ray start --address "$SHARDWRIGHT_RAY_ADDRESS" --num-cpus 0

shardwright serve &
server=$!
trap 'kill -TERM "$server"' TERM INT

node_is_alive() {
    grep --quiet --no-messages '^raylet$' /proc/[0-9]*/comm
}
while node_is_alive; do sleep 5; done &
node=$!

ended=0
wait -n "$server" "$node" || ended=$?
if kill -0 "$server" 2>/dev/null; then
    echo "error: the Ray node has ended" >&2
    ended=1
    kill -TERM "$server"
    wait "$server" || true
fi
kill "$node" 2>/dev/null || true
exit "$ended"
