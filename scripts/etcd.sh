#!/usr/bin/env bash
# A real etcd for the tests of the election, without installing it: the one in the PATH, or the binary of Debian's package
# etcd-server (21 MB).
#   etcd.sh [FOLDER]   (default: .venv/etcd; the binary is in FOLDER/usr/bin)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv/etcd}
binary=$folder/usr/bin/etcd
[ -x "$binary" ] && exit 0
mkdir -p "$(dirname "$binary")"
if found=$(command -v etcd); then ln -sf "$found" "$binary"; exit 0; fi
command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo 'etcd: neither etcd nor apt-get is here' >&2; exit 1; }
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
fetch() { (cd "$package" && apt-get -q download etcd-server >/dev/null 2>&1); }
fetch || { [ "$(id -u)" = 0 ] && apt-get update -qq >/dev/null 2>&1 && fetch; } || { echo 'etcd: apt-get download etcd-server failed' >&2; exit 1; }
dpkg -x "$package"/*.deb "$folder"
