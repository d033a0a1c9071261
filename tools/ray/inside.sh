#!/bin/sh
# Runs a command in a network and process namespace of its own: Ray finds only 127.0.0.1 there, disturbs no other Ray
# on this machine, and whatever it leaves behind ends with the namespace.
# Usage: tools/ray/inside.sh COMMAND [ARGUMENT...]
set -eu

if [ "$#" -eq 0 ]; then
    echo "usage: tools/ray/inside.sh COMMAND [ARGUMENT...]" >&2
    exit 2
fi
tools=$(cd "$(dirname "$0")" && pwd)
python=$(command -v "${PYTHON:-$tools/../../.venv/bin/python}" || command -v python3 || :)
if [ -z "$python" ] || ! command -v unshare >/dev/null 2>&1; then
    echo "Ray's cluster is left out: there is no Python or no 'unshare'; remedy: install python3 and util-linux" >&2
    exit 77
fi

begin='"$1" "$2" && shift 2 && export POLLUX_TEST_NAMESPACE=1 && exec "$@"'
for user in "" "--user --map-root-user"; do
    apart="unshare $user --net --pid --fork --kill-child --mount-proc"
    if $apart true 2>/dev/null; then
        exec $apart sh -c "$begin" sh "$python" "$tools/loopback.py" "$@"
    fi
done
echo "Ray's cluster is left out: no namespaces here; remedy: run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a container: --privileged)" >&2
exit 77
