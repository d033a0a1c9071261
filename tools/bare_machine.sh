#!/usr/bin/env bash
# Runs Make targets of a clean clone in a bare Debian: Python, gcc, git, node, make, apt, pip and npm, nothing else.
# The machine is a folder made by debootstrap. It has a process and mount namespace of its own, so that everything in it
# ends with this script; it shares the network. The host's settings of apt, pip, npm and certificates are carried in.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tools/bare_machine.sh [OPTION...] [TARGET...]

Runs the Make targets (default: demo test) of a clean clone of HEAD in a bare Debian. Needs root and debootstrap.

  --release NAME       bookworm (default: Debian 12) or trixie (Debian 13)
  --user root|plain    who runs them; a plain user may install no packages (default: root)
  --torch-wheel PATH   a wheel of torch's CPU build, or a folder with it; without it pip brings the build with CUDA
  --path PATH          where the clone is in the machine (default: /srv/pollux)
  --mirror URL         the Debian archive to make the machine from; by default the host's own, as apt knows it
  --data FOLDER        the published OSDI'21 data, shown to the tests read-only
  --set NAME=VALUE     a variable for the targets, such as PYTEST_ADDOPTS=--durations=50; may be given again
  --ci                 run with CI=true, where a skipped test is a failure
  --dir FOLDER         where machines, downloads and transcripts are (default: build/bare); 3 to 12 GB a machine
  --keep               leave the machine in its folder; the default is to remove it

The transcript is FOLDER/NAME.log; its last line says what was run, on what, and how it ended.
TEXT
}

# pivot_root and not chroot: in a chroot the kernel allows no user namespaces, which an ordinary machine has.
enter_script() {
    cat <<'TEXT'
set -euo pipefail
machine=$1 clone=$2 user=$3
shift 3
count=$1
shift
mount --make-rprivate /
mount --bind "$machine" "$machine"
while [ "$count" -gt 0 ]; do
    mkdir -p "$machine${1#*:}"
    mount --bind "${1%%:*}" "$machine${1#*:}"
    shift && count=$((count - 1))
done
mount --rbind /sys "$machine/sys"
mount -t tmpfs -o mode=755 tmpfs "$machine/dev"
for device in null zero full random urandom tty; do
    touch "$machine/dev/$device"
    mount --bind "/dev/$device" "$machine/dev/$device"
done
mkdir -p "$machine/dev/pts" "$machine/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$machine/dev/pts"
ln -s pts/ptmx "$machine/dev/ptmx"
ln -s /proc/self/fd "$machine/dev/fd"
ln -s fd/0 "$machine/dev/stdin" && ln -s fd/1 "$machine/dev/stdout" && ln -s fd/2 "$machine/dev/stderr"
mount -t tmpfs -o mode=1777 tmpfs "$machine/dev/shm"
mount -t proc proc "$machine/proc"
mkdir -p "$machine/.host"
cd "$machine"
pivot_root . .host
umount -l /.host
mapfile -d '' -t settings </settings
who=()
[ "$user" = root ] || who=(setpriv --reuid=1000 --regid=1000 --init-groups)
cd "$clone"
exec env -i "${settings[@]}" "${who[@]}" "$@"
TEXT
}

# A function, since bash reads a script as it goes: one that is edited meanwhile would end in the middle.
main() {
    root=$(cd "$(dirname "$0")/.." && pwd)
    release=bookworm user=root wheel='' clone=/srv/pollux mirror='' data='' ci='' folder=$root/build/bare keep=''
    targets=() more=()
    fail() {
        echo "tools/bare_machine.sh: $*" >&2
        exit 2
    }
    while [ $# -gt 0 ]; do
        case $1 in
        --release | --user | --torch-wheel | --path | --mirror | --data | --dir | --set) [ $# -ge 2 ] || fail "$1 needs a value" ;;
        esac
        case $1 in
        --release) release=$2 && shift 2 ;;
        --user) user=$2 && shift 2 ;;
        --torch-wheel) wheel=$(realpath "$2") && shift 2 ;;
        --path) clone=$2 && shift 2 ;;
        --mirror) mirror=$2 && shift 2 ;;
        --data) data=$(realpath "$2") && shift 2 ;;
        --dir) folder=$2 && shift 2 ;;
        --set) more+=("$2") && shift 2 ;;
        --ci) ci=true && shift ;;
        --keep) keep=yes && shift ;;
        -h | --help) usage && exit 0 ;;
        -*) usage >&2 && fail "there is no option '$1'" ;;
        *) targets+=("$1") && shift ;;
        esac
    done
    [ ${#targets[@]} -gt 0 ] || targets=(demo test)
    case $user in root | plain) ;; *) fail "--user is 'root' or 'plain', not '$user'" ;; esac
    case $clone in /?*) ;; *) fail "--path is an absolute path, not '$clone'" ;; esac
    [ -z "$wheel" ] || [ -e "$wheel" ] || fail "there is no wheel at '$wheel'"
    [ -z "$data" ] || [ -d "$data" ] || fail "there is no folder '$data'"
    [ "$(id -u)" = 0 ] || fail "debootstrap and namespaces need root: run it as root"
    command -v debootstrap >/dev/null || fail "there is no debootstrap: apt-get update && apt-get install -y debootstrap"

    mkdir -p "$folder"
    folder=$(cd "$folder" && pwd)
    name=$release-$user-$([ -n "$wheel" ] && echo wheel || echo cuda)
    machine=$folder/$name
    base=$folder/$release.tar
    # Not every host is a Debian, or has apt.
    [ -n "$mirror" ] || mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' \
        2>/dev/null | grep -v security | sort -u | head -n 1) || :
    [ -n "$mirror" ] || fail "apt knows no Debian archive here: apt-get update, or name one with --mirror, such as http://deb.debian.org/debian"

    # Proxies, certificates, sign-ins and the like. What runs programs of this host, or removes packages, stays here.
    carry_apt() { # FOLDER
        mkdir -p "$1/etc/apt/apt.conf.d" "$1/etc/apt/auth.conf.d"
        for file in /etc/apt/apt.conf.d/*; do
            [ -f "$file" ] && grep -qE '^ *(Acquire|APT::Authentication)' "$file" || continue
            ! grep -qE 'Pre-Invoke|Post-Invoke|Proxy-Auto-Detect|^ *#clear' "$file" || continue
            cp "$file" "$1/etc/apt/apt.conf.d/"
        done
        for file in /etc/apt/auth.conf.d/*; do
            [ ! -f "$file" ] || cp -p "$file" "$1/etc/apt/auth.conf.d/"
        done
    }

    # The bare Debian, once for each release.
    if [ ! -f "$base" ]; then
        echo "== debootstrap $release into $base"
        rm -rf "$folder/$release.new"
        # No recommended packages: npm alone would bring a compiler and a test suite.
        debootstrap --variant=minbase "$release" "$folder/$release.new" "$mirror" >"$folder/$release.debootstrap.log" ||
            fail "debootstrap of $release failed: see $folder/$release.debootstrap.log"
        cp /etc/resolv.conf "$folder/$release.new/etc/resolv.conf"
        carry_apt "$folder/$release.new"
        chroot "$folder/$release.new" env DEBIAN_FRONTEND=noninteractive sh -c '
            apt-get update -qq && apt-get install -y -qq --no-install-recommends \
                python3 python3-venv python3-pip python3-dev gcc libc6-dev git nodejs npm make ca-certificates' \
            >>"$folder/$release.debootstrap.log" 2>&1 ||
            fail "its packages could not be installed: see $folder/$release.debootstrap.log"
        rm -rf "$folder/$release.new/var/cache/apt/archives/"*.deb "$folder/$release.new/etc/apt/auth.conf.d/"*
        tar -C "$folder/$release.new" --one-file-system -cf "$base.new" .
        mv "$base.new" "$base"
        rm -rf "$folder/$release.new"
    fi

    # The machine, a clean clone, and the host's settings of packages.
    rm -rf "$machine"
    mkdir -p "$machine"
    tar -C "$machine" -xf "$base"
    home=/root owner=0:0
    if [ "$user" = plain ]; then
        chroot "$machine" useradd --create-home --uid 1000 --shell /bin/bash somebody
        home=/home/somebody owner=1000:1000
    fi
    git clone --quiet --no-hardlinks "$root" "$machine$clone"
    git -C "$machine$clone" remote remove origin
    chown -R "$owner" "$machine$clone"
    cp /etc/resolv.conf /etc/hosts "$machine/etc/"
    carry_apt "$machine"
    [ ! -f /etc/ssl/certs/ca-certificates.crt ] || cp /etc/ssl/certs/ca-certificates.crt "$machine/etc/ssl/certs/"
    shared=()
    carry_pip() { # FILE PLACE: folders of packages on this machine go along; where wheels lie is --torch-wheel's to say
        [ -f "$1" ] || return 0
        mkdir -p "$(dirname "$machine$2")"
        sed '/^ *find-links/d' "$1" >"$machine$2"
        while read -r path; do
            [ ! -d "$path" ] || shared+=("$path")
        done < <(grep -o 'file://[^ ]*' "$1" | sed 's,file://,,; s,/simple$,,')
    }
    carry_pip /etc/pip.conf /etc/pip.conf
    carry_pip "${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf" "$home/.config/pip/pip.conf"
    [ ! -f "$HOME/.npmrc" ] || install -o "${owner%:*}" -g "${owner%:*}" -m 644 "$HOME/.npmrc" "$machine$home/.npmrc"

    settings=(HOME="$home" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}")
    settings+=(USER="$([ "$user" = root ] && echo root || echo somebody)" SHELL=/bin/bash)
    while IFS= read -r -d '' word; do
        case $word in
        PIP_FIND_LINKS=*) ;;
        PIP_* | *_proxy=* | *_PROXY=* | SSL_CERT_FILE=* | REQUESTS_CA_BUNDLE=* | CURL_CA_BUNDLE=* | NODE_EXTRA_CA_CERTS=* | npm_config_*) settings+=("$word") ;;
        esac
    done < <(env -0)
    [ -z "$wheel" ] || settings+=(PIP_FIND_LINKS=/opt/wheels)
    [ -z "$data" ] || settings+=(POLLUX_OSDI21_DATA=/opt/osdi21)
    [ -z "$ci" ] || settings+=(CI=true)
    settings+=("${more[@]}")

    # Seen from the machine at places of their own: a shared cache of pip's downloads, wheels, the published data.
    mkdir -p "$folder/pip-cache-$user" "$machine$home/.cache/pip"
    chown -R "$owner" "$machine$home" "$folder/pip-cache-$user"
    binds=("$folder/pip-cache-$user:$home/.cache/pip")
    for path in "${shared[@]}"; do binds+=("$path:$path"); done
    [ -z "$data" ] || binds+=("$data:/opt/osdi21")
    if [ -n "$wheel" ]; then
        [ -d "$wheel" ] && binds+=("$wheel:/opt/wheels") || binds+=("$(dirname "$wheel"):/opt/wheels")
    fi
    printf '%s\0' "${settings[@]}" >"$machine/settings"

    enter_script >"$machine/enter"

    log=$folder/$name.log
    commit=$(git -C "$root" rev-parse --short HEAD)
    started=$(date +%s) result=green
    : >"$log"
    for target in "${targets[@]}"; do
        echo "== make $target, $(date -u +%FT%TZ)" | tee -a "$log"
        begun=$(date +%s)
        code=0
        unshare --mount --pid --fork --kill-child --ipc --uts \
            bash "$machine/enter" "$machine" "$clone" "$user" "${#binds[@]}" "${binds[@]}" make "$target" \
            >>"$log" 2>&1 </dev/null || code=$?
        echo "== make $target ended with $code after $(($(date +%s) - begun)) s" | tee -a "$log"
        [ "$code" = 0 ] || { result="red: make $target ended with $code" && break; }
    done
    what="$name, commit $commit, make ${targets[*]}${ci:+ with CI=true}${data:+ with the published data}"
    echo "== $what: $result after $(($(date +%s) - started)) s" | tee -a "$log"
    [ -n "$keep" ] || rm -rf "$machine"
    [ "$result" = green ]
}

main "$@"
