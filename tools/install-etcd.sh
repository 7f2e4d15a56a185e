#!/bin/sh
# Puts etcd and etcdctl 3.5 into .cache/etcd/3.5 of this project, for the tests and for `gpuward demo --store etcd`.
#
# They come, checked by apt against the system's Debian keyring, from Debian 13 (its 3.5.16 runs on Debian 12 too: it
# needs libc6 >= 2.34) over the mirror that this machine uses already. The system's apt lists and packages stay as
# they are. Elsewhere a package of 3.5 or later that apt knows is unpacked, or what is on PATH is linked.
# Where the machine's own apt offers etcd 3.4 (Debian 12), that is unpacked into .cache/etcd/3.4, for the tests that run
# on it too. Quick when they are there already. Ends with one line that says what is missing, and not 0, when it cannot.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
parent=$root/.cache/etcd
target=$parent/3.5
suite=trixie
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
work=

finish() {
    if [ -n "$work" ]; then rm -rf -- "$work"; fi
}
trap finish EXIT
trap 'exit 130' INT TERM

fail() {
    echo "install-etcd: $1; put etcd and etcdctl 3.5 or later on PATH instead, or name their folder in GPUWARD_ETCD_DIR" >&2
    exit 1
}

# version_of BINARY: prints "3.5.16", or nothing.
version_of() {
    "$1" version 2>/dev/null | sed -n 's/^etcdctl version: *//p' | head -n 1 || true
}

# good VERSION: 3.5 or later?
good() {
    major=${1%%.*}
    rest=${1#*.}
    minor=${rest%%.*}
    case $major$minor in '' | *[!0-9]*) return 1 ;; esac
    [ "$major" -gt 3 ] || { [ "$major" -eq 3 ] && [ "$minor" -ge 5 ]; }
}

# usable FOLDER: do both binaries in it run, and are they new enough?
usable() {
    [ -x "$1/etcd" ] && [ -x "$1/etcdctl" ] && "$1/etcd" --version >/dev/null 2>&1 && good "$(version_of "$1/etcdctl")"
}

# publish FOLDER: the finished folder appears in one rename; a half-made one never does.
publish() {
    usable "$1" || fail "the etcd that was unpacked does not run here: $("$1/etcd" --version 2>&1 | head -n 1)"
    rm -rf -- "$target"
    mv -T -- "$1" "$target" 2>/dev/null || usable "$target" || fail "cannot write $target"
    echo "etcd $(version_of "$target/etcdctl") in $target"
    exit 0
}

# archives: the Debian mirrors in the machine's own apt sources, both formats, one a line, security archives left out.
archives() {
    {
        cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
            sed -n 's/^[[:space:]]*deb[[:space:]]\{1,\}\(\[[^]]*\][[:space:]]\{1,\}\)\{0,1\}\([^[:space:]]\{1,\}\).*/\2/p'
        cat /etc/apt/sources.list.d/*.sources 2>/dev/null |
            sed -n 's/^[Uu][Rr][Ii][Ss]:[[:space:]]*//p' | tr -s ' \t' '\n\n'
    } | sed 's:/*$::' | grep -E '/debian$|/debian\.list$' | awk '!seen[$0]++'
}

# from_archive MIRROR: unpacks Debian 13's packages into $work/unpacked.
from_archive() {
    printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$1" "$suite" >"$work/sources.list"
    set -- -q -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o Acquire::Retries=3 \
        -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false \
        -o APT::Update::Error-Mode=any -o APT::Sandbox::User=root
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
    attempt=1
    until apt-get "$@" update >"$work/log" 2>&1; do
        [ "$attempt" -lt 3 ] || return 1
        attempt=$((attempt + 1))
        sleep 2
    done
    (cd "$work/debs" && apt-get "$@" download "etcd-server/$suite" "etcd-client/$suite") >"$work/log" 2>&1 || return 1
    unpack
}

# from_system: what the machine's own apt lists offer, if it is new enough (Ubuntu 24.10 and later, say).
from_system() {
    offered=$(apt-cache policy etcd-server 2>/dev/null | sed -n 's/^ *Candidate: *//p')
    good "${offered#*:}" || return 1
    mkdir -p "$work/debs"
    (cd "$work/debs" && apt-get -q -o APT::Sandbox::User=root download etcd-server etcd-client) >"$work/log" 2>&1 || return 1
    unpack
}

# unpack: all of $work/debs, nothing of them being installed or run.
unpack() {
    mkdir -p "$work/unpacked" "$work/ready"
    for package in "$work"/debs/*.deb; do
        dpkg -x "$package" "$work/unpacked" || return 1
    done
    cp -- "$work/unpacked/usr/bin/etcd" "$work/unpacked/usr/bin/etcdctl" "$work/ready/"
}

# older: etcd 3.4 from the machine's own apt lists, if they have it; never a reason to fail.
older() {
    old=$parent/3.4
    if [ -x "$old/etcd" ]; then return; fi
    offered=$(apt-cache policy etcd-server 2>/dev/null | sed -n 's/^ *Candidate: *//p')
    case ${offered#*:} in 3.4.*) ;; *) echo "etcd 3.4: apt offers none, tests on it are skipped"; return ;; esac
    work=$(mktemp -d "$parent/.older.XXXXXX") || return 0
    if (
        cd "$work" && apt-get -q -o APT::Sandbox::User=root download etcd-server etcd-client >log 2>&1 || exit 1
        for package in ./*.deb; do dpkg -x "$package" unpacked || exit 1; done
        unpacked/usr/bin/etcd --version >/dev/null 2>&1 && mv -T unpacked/usr/bin "$old"
    ); then
        echo "etcd $(version_of "$old/etcdctl") in $old"
    else
        echo "etcd 3.4: apt gave none, tests on it are skipped"
    fi
    finish
    work=
}

mkdir -p "$parent" 2>/dev/null || fail "cannot make the folder $parent"
older

if usable "$target"; then
    echo "etcd $(version_of "$target/etcdctl") in $target, nothing to do"
    exit 0
fi
work=$(mktemp -d "$parent/.install.XXXXXX") || fail "cannot write into $parent"

if command -v etcd >/dev/null && command -v etcdctl >/dev/null; then
    mkdir "$work/linked"
    ln -s "$(command -v etcd)" "$work/linked/etcd"
    ln -s "$(command -v etcdctl)" "$work/linked/etcdctl"
    if usable "$work/linked"; then publish "$work/linked"; fi
fi

for tool in apt-get apt-cache dpkg; do
    command -v "$tool" >/dev/null || fail "$tool is missing, so no package can be fetched"
done
if [ -r "$keyring" ]; then
    for mirror in $(archives); do
        if from_archive "$mirror"; then publish "$work/ready"; fi
    done
fi
if from_system; then publish "$work/ready"; fi
reason=$(grep -m 1 '^[EW]:' "$work/log" 2>/dev/null || true)
fail "no Debian archive among this machine's apt sources gave etcd 3.5${reason:+ ($reason)}"
