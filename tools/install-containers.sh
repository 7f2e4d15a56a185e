#!/bin/sh
# Puts a Docker engine, podman, a static busybox, nft and iptables into .cache/containers of this project, for the tests.
#
# The packages come by apt from the machine's own Debian or Ubuntu archive, with what they depend on and the machine has
# not. They are unpacked, not installed: nothing of them is started, and the system's packages and apt lists stay as they
# are. Where apt is missing nothing is done: the tests then use dockerd and podman on PATH, or say what is missing.
# Quick when they are there already. Ends with one line that says what is missing, and not 0, when it cannot.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=$root/.cache/containers
packages='docker.io podman runc busybox-static nftables iptables'
iptables=usr/sbin/xtables-legacy-multi
work=

finish() {
    if [ -n "$work" ]; then rm -rf -- "$work"; fi
}
trap finish EXIT
trap 'exit 130' INT TERM

fail() {
    echo "install-containers: $1; the tests of containers need dockerd and podman" >&2
    exit 1
}

# apt ARGUMENTS…: with a cache of our own, so that it never waits for the system's lock.
apt() {
    apt-get -q -o APT::Sandbox::User=root -o "Dir::Cache=$work/cache" -o Acquire::Retries=3 -o Acquire::Languages=none \
        -o Debug::NoLocking=true "$@" >"$work/log" 2>&1
}

# download [OPTIONS…]: what the machine lacks of the packages, into $work/cache.
download() {
    # shellcheck disable=SC2086 # several words
    apt "$@" -y --no-install-recommends --download-only --reinstall install $packages
}

if [ -x "$target/usr/sbin/dockerd" ] && [ -x "$target/usr/sbin/nft" ] && [ -x "$target/$iptables" ]; then
    echo "Docker and podman in $target, nothing to do"
    exit 0
fi
for tool in apt-get dpkg-deb; do
    if ! command -v "$tool" >/dev/null; then
        echo "install-containers: $tool is missing: the tests use dockerd and podman on PATH, if there are any" >&2
        exit 0
    fi
done
mkdir -p "$root/.cache" 2>/dev/null || fail "cannot make the folder $root/.cache"
work=$(mktemp -d "$root/.cache/.containers.XXXXXX") || fail "cannot write into $root/.cache"
mkdir -p "$work/cache/archives/partial" "$work/lists/partial" "$work/unpacked"
if ! download; then # the system's lists are missing or old
    lists="-o Dir::State::Lists=$work/lists"
    apt "$lists" update || fail "apt-get update: $(grep -m 1 '^[EW]:' "$work/log" || echo failed)"
    download "$lists" || fail "apt-get: $(grep -m 1 '^E:' "$work/log" || echo failed)"
fi
for package in "$work"/cache/archives/*.deb; do
    case ${package##*/} in
        login_* | passwd_* | libc6_* | init-system-helpers_* | containernetworking-plugins_*) ;; # not needed unpacked
        *) dpkg-deb -x "$package" "$work/unpacked" || fail "cannot unpack ${package##*/}" ;;
    esac
done
[ -x "$work/unpacked/usr/sbin/dockerd" ] && [ -x "$work/unpacked/usr/bin/podman" ] &&
    [ -x "$work/unpacked/usr/sbin/nft" ] && [ -x "$work/unpacked/$iptables" ] ||
    fail "the packages lack dockerd, podman, nft or iptables"
rm -rf -- "$target"
mv -T -- "$work/unpacked" "$target" 2>/dev/null || [ -x "$target/usr/sbin/dockerd" ] || fail "cannot write $target"
echo "Docker $("$target/usr/bin/docker" --version 2>/dev/null | sed -n 's/^Docker version \([^,]*\).*/\1/p') and podman in $target"
