#!/bin/sh
# A Prometheus server for tests/integration/metrics: Debian's package, unpacked into build/tools, nothing installed or
# started. Prints where the program is. Does nothing where one is there already.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/build/tools/prometheus
if [ -n "${POLLUX_PROMETHEUS:-}" ]; then
    echo "$POLLUX_PROMETHEUS"
elif [ -x "$folder/usr/bin/prometheus" ]; then
    echo "$folder/usr/bin/prometheus"
elif command -v prometheus; then
    :
else
    "$root/tools/debian.sh" unpack Prometheus "$folder" prometheus >&2
    echo "$folder/usr/bin/prometheus"
fi
