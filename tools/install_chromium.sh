#!/bin/sh
# What tests/browser need and pip does not bring: a Chromium. Does nothing where there is one.
set -eu
if [ -z "${POLLUX_CHROMIUM:-}" ] && ! command -v chromium >/dev/null 2>&1 && ! command -v chromium-browser >/dev/null 2>&1
then
    "$(dirname "$0")/debian.sh" install Chromium chromium fonts-dejavu-core
fi
