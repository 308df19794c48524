#!/usr/bin/env bash
# A real redis-server for the tests of stored responses, without installing it: the one in the PATH (or valkey-server), or
# the binary of Debian's packages with the libraries that it needs (4 MB).
#   redis.sh [FOLDER]   (default: .venv/redis; the binary is FOLDER/redis-server, its libraries are in FOLDER/lib)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv/redis}
[ -x "$folder/redis-server" ] && exit 0
mkdir -p "$folder"
if found=$(command -v redis-server || command -v valkey-server); then ln -sf "$found" "$folder/redis-server"; exit 0; fi
command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo 'redis: neither redis-server nor apt-get is here' >&2; exit 1; }
# Debian's redis-server is a link to redis-check-rdb of redis-tools. This binary looks at its own name.
packages=(redis-tools libatomic1 libjemalloc2 liblua5.1-0 liblzf1 lua-bitop lua-cjson)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { (cd "$work" && apt-get -q download "${packages[@]}" >/dev/null 2>&1); }
fetch || { [ "$(id -u)" = 0 ] && apt-get update -qq >/dev/null 2>&1 && fetch; } || { echo 'redis: apt-get download redis-tools failed' >&2; exit 1; }
for package in "$work"/*.deb; do dpkg -x "$package" "$work/files"; done
mkdir -p "$folder/lib"
find "$work/files" -name '*.so*' ! -path '*/lua/*' -exec cp -P {} "$folder/lib/" \;
cp "$work/files/usr/bin/redis-check-rdb" "$folder/redis-server"
