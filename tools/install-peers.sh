#!/bin/sh
# Puts other supervisors into .cache/peers of this project, for benchmarks/supervisors.py: runit, s6 and monit by apt,
# supervisord and circus in virtual environments of their own (PyPI's `supervisor` has an import package of our name),
# pm2 where npm is there.
#
# Packages come from the machine's own archive, with what they depend on and the machine has not. They are unpacked, not
# installed: nothing of them is started, and the system's packages and apt lists stay as they are. Quick when they are
# there already. A peer that cannot be had is named in one line; the benchmark goes on without it, and so this ends with 0.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=$root/.cache/peers
packages='runit s6 monit'
python=${PYTHON:-$root/.venv/bin/python}
work=

finish() {
    if [ -n "$work" ]; then rm -rf -- "$work"; fi
}
trap finish EXIT
trap 'exit 130' INT TERM

say() {
    echo "install-peers: $1" >&2
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

# from_apt: unpacks the packages into $work/apt.
from_apt() {
    mkdir -p "$work/cache/archives/partial" "$work/lists/partial" "$work/apt"
    if ! download; then # the system's lists are missing or old
        apt -o "Dir::State::Lists=$work/lists" update && download -o "Dir::State::Lists=$work/lists" || return 1
    fi
    for package in "$work"/cache/archives/*.deb; do
        case ${package##*/} in libc6_* | init-system-helpers_* | sysuser-helper_*) continue ;; esac # not needed unpacked
        dpkg-deb -x "$package" "$work/apt" || return 1
    done
    mv -T -- "$work/apt" "$target/apt"
}

# from_pypi NAME REQUIREMENT: a virtual environment of its own; nothing of a half-made one stays.
from_pypi() {
    "$python" -m venv "$target/$1" && "$target/$1/bin/python" -m pip install -q --disable-pip-version-check "$2" && return
    rm -rf -- "$target/$1"
    return 1
}

# from_npm: below $work first, for the same reason.
from_npm() {
    npm install --prefix "$work/pm2" --cache "$work/npm" --no-audit --no-fund --ignore-scripts "pm2@7.0.4" >"$work/log" 2>&1 &&
        mv -T -- "$work/pm2" "$target/pm2"
}

# want NAME COMMAND…: runs the command where the folder NAME is not there yet.
want() {
    name=$1
    shift
    [ -d "$target/$name" ] || "$@" || say "no $name: $(grep -m 1 -E '^(E:|npm err|npm ERR)' "$work/log" 2>/dev/null || echo "$1 failed")"
}

mkdir -p "$target"
work=$(mktemp -d "$target/.install.XXXXXX")
if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
    want apt from_apt
else
    say "no $packages: apt-get or dpkg-deb is missing"
fi
want supervisord from_pypi supervisord supervisor==4.3.0
want circus from_pypi circus circus==0.19.0
if command -v npm >/dev/null; then want pm2 from_npm; else say "no pm2: npm is missing"; fi
echo "peers in $target: $(ls "$target" | tr '\n' ' ')"
