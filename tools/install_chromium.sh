#!/bin/sh
# What tests/browser need and pip does not bring: a Chromium. Does nothing where there is one.
set -eu
if [ -z "${POLLUX_CHROMIUM:-}" ] && ! command -v chromium >/dev/null 2>&1 && ! command -v chromium-browser >/dev/null 2>&1; then
    sudo=
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "there is no Chromium and no apt-get: install Chromium and set POLLUX_CHROMIUM to its program" >&2
        exit 1
    fi
    $sudo apt-get update -qq
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
fi
