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
    new=$(mktemp -d)
    trap 'rm -rf "$new"' EXIT
    cd "$new"
    if ! apt-get download -qq prometheus >&2; then
        sudo=
        [ "$(id -u)" = 0 ] || sudo="sudo -n"
        $sudo apt-get update -qq >&2
        apt-get download -qq prometheus >&2
    fi
    dpkg-deb -x prometheus_*.deb unpacked
    mkdir -p "$(dirname "$folder")"
    rm -rf "$folder"
    mv unpacked "$folder"
    echo "$folder/usr/bin/prometheus"
fi
