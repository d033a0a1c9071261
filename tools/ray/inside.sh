#!/bin/sh
# Runs a command in a network and process namespace of its own: Ray finds only 127.0.0.1 there, disturbs no other Ray
# on this machine, and whatever it leaves behind ends with the namespace.
# Usage: tools/ray/inside.sh COMMAND [ARGUMENT...]
set -eu

if [ "$#" -eq 0 ]; then
    echo "usage: tools/ray/inside.sh COMMAND [ARGUMENT...]" >&2
    exit 2
fi
for tool in unshare ip; do
    if ! command -v "$tool" >/dev/null 2>&1; then
        echo "tools/ray/inside.sh: there is no '$tool': install util-linux and iproute2" >&2
        exit 77
    fi
done

begin='ip link set lo up && export POLLUX_TEST_NAMESPACE=1 && exec "$@"'
if unshare --net --pid --fork --kill-child --mount-proc true 2>/dev/null; then
    exec unshare --net --pid --fork --kill-child --mount-proc sh -c "$begin" sh "$@"
fi
if unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc true 2>/dev/null; then
    exec unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc sh -c "$begin" sh "$@"
fi
echo "tools/ray/inside.sh: no namespaces here: run it as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a container: --privileged)" >&2
exit 77
