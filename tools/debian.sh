#!/bin/sh
# The only place that asks Debian's package manager. It waits for others that ask it at the same time. Where it may not
# install anything, or cannot, it says in one line what is left out, why, and the remedy; its exit code is then 1.
# Usage: tools/debian.sh install PART PACKAGE...        (as root, or by a sudo that asks for no password)
#        tools/debian.sh unpack PART FOLDER PACKAGE     (one package into FOLDER; nothing is installed)
set -eu

if [ "$#" -lt 3 ]; then
    echo "usage: tools/debian.sh install PART PACKAGE... | unpack PART FOLDER PACKAGE" >&2
    exit 2
fi
action=$1 part=$2
shift 2
[ "$action" = install ] || { folder=$1 && shift; }
by_hand="apt-get update && apt-get install -y --no-install-recommends $*"

leave_out() {
    echo "$part is left out: $1; remedy: $2" >&2
    exit 1
}

# Runs a command of the package manager; $said is what it has to say. Its own patience ends at dpkg's lock: that of the
# lists is asked for again here.
patiently() {
    left=600
    until said=$("$@" 2>&1); do
        case $said in *"Could not get lock"*) ;; *) return 1 ;; esac
        [ "$left" -gt 0 ] || return 1
        left=$((left - 2))
        sleep 2
    done
}

apt() {
    patiently ${sudo:+sudo -n} env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 "$@"
}

# The error that the package manager names first, on one line.
error() {
    found=$(echo "$said" | grep '^E: ' || echo "$said")
    echo "$found" | head -n 1
}

command -v apt-get >/dev/null 2>&1 || leave_out "there is no apt-get here" "install by other means: $*"
may=no sudo=
if [ "$(id -u)" = 0 ]; then
    may=yes
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    may=yes sudo=yes
fi

if [ "$action" = install ]; then
    [ "$may" = yes ] || leave_out "only root installs packages" "have an administrator run: $by_hand"
    apt update || :  # what failed here may not be needed
    apt install -y --no-install-recommends "$@" || leave_out "apt-get says '$(error)'" "run as root: $by_hand"
    exit 0
fi

mkdir -p "$(dirname "$folder")"
# On the same file system, as what is complete is renamed; by its full path, as the package manager has another user.
new=$(mktemp -d "$(dirname "$folder")/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
cd "$new"
if ! patiently env LC_ALL=C apt-get -qq download "$1"; then
    [ "$may" = no ] || apt update || :
    patiently env LC_ALL=C apt-get -qq download "$1" ||
        leave_out "apt-get says '$(error)'" "have an administrator run: $by_hand"
fi
dpkg-deb -x "$1"_*.deb unpacked
# Another run may have been faster: what it brought is as good.
mv -T unpacked "$folder" 2>/dev/null || [ -d "$folder" ]
