#!/bin/sh
# What tests/browser need and pip does not bring: a Chromium, and axe-core. Does nothing where both are there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v chromium >/dev/null 2>&1 && [ -z "${POLLUX_CHROMIUM:-}" ]; then
    sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
fi
"${PYTHON:-python3}" "$root/tools/vendor_web.py" --axe
