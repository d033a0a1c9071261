#!/bin/sh
# What tests/browser need and pip does not bring: a Chromium. Does nothing where there is one.
set -eu
if ! command -v chromium >/dev/null 2>&1 && [ -z "${POLLUX_CHROMIUM:-}" ]; then
    sudo=
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "there is no Chromium and no apt-get: install Chromium and set POLLUX_CHROMIUM to its program" >&2
        exit 1
    fi
    $sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
fi
