#!/usr/bin/env bash
# README's two commands on a bare Debian: in a folder of its own, without configuration, wheels or caches of this machine.
# Prints the minutes and megabytes of each command, and which one failed. It tries the commit that is checked out.
# Usage: scripts/fresh.sh [trixie | bookworm | another suite] [arguments of scripts/test.sh, such as --fast]
# Needs root, debootstrap, and 20 GB of disk in TMPDIR. KEEP=1 leaves the folder. MIRROR=URL takes Debian from there.
set -euo pipefail

suite="${1:-trixie}"
shift || true
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    echo "error: fresh.sh needs root, and debootstrap (apt-get install debootstrap)" >&2
    exit 2
fi
work="$(mktemp -d -t "fresh-$suite.XXXX")"
debian="$work/debian"
[ -n "${KEEP:-}" ] || trap 'rm -rf --one-file-system "$work"' EXIT

echo "fresh: $suite in $work" >&2
# What README asks a reader for: git, Python with venv, a C++ compiler.
debootstrap --variant=minbase --include=ca-certificates,g++,git,python3-venv "$suite" "$debian" \
    "${MIRROR:-http://deb.debian.org/debian}" >"$work/debootstrap.log" 2>&1 || { tail "$work/debootstrap.log" >&2; exit 1; }
# The way to the network is the host's: its name servers and its certificates.
cp -L /etc/resolv.conf "$debian/etc/resolv.conf"
cp -L /etc/ssl/certs/ca-certificates.crt "$debian/etc/ssl/certs/ca-certificates.crt"
git clone --quiet --no-hardlinks "$root" "$debian/srv/locret_kit"
touch "$debian/srv/pip.log"
commit="$(git -C "$debian/srv/locret_kit" log -1 --format='%h of %as')"

inside() { # a command in the clone, with an environment of its own; mounts and processes end with it
    unshare --mount --pid --fork bash -c '
        mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"
        exec chroot "$0" env -i HOME=/srv PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 PIP_LOG=/srv/pip.log \
            ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} bash -c "cd /srv/locret_kit && $1"
    ' "$debian" "$1"
}

downloaded() { # megabytes: what pip says that it downloads, and the packages that apt keeps
    local packages
    packages="$(du --summarize --block-size=1MB "$debian/var/cache/apt/archives" | cut -f1)"
    awk -v sum="$packages" '
        / Downloading / && match($0, /\([0-9.]+ [kM]B\)/) { split(substr($0, RSTART + 1), n, " "); sum += n[2] ~ /^k/ ? n[1] / 1000 : n[1] }
        END { printf "%d\n", sum }' "$debian/srv/pip.log"
}

python="$(inside 'python3 -V')"
failed=0
for command in "bash scripts/demo.sh" "bash scripts/test.sh${*:+ $*}"; do
    before="$(downloaded)" began=$SECONDS status=passed
    inside "$command" </dev/null 2>&1 | tee "$work/log" | tail -40 || { status=FAILED failed=1; }
    echo "fresh: $suite, $python, commit $commit: '$command' $status after $(((SECONDS - began + 30) / 60)) min," \
        "$(($(downloaded) - before)) MB downloaded" | tee -a "$work/summary"
done
echo "fresh: torch $(inside '.venv/bin/python -c "import torch; print(torch.__version__)"')" | tee -a "$work/summary"
cat "$work/summary"
exit "$failed"
