#!/bin/sh
# Runs a command and prints what it said when it has ended, so that commands that run beside each other can be read.
# Usage: tools/afterwards.sh COMMAND [ARGUMENT...]
set -u
said=$(mktemp)
trap 'cat "$said"; rm -f "$said"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$@" >"$said" 2>&1
