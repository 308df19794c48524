#!/usr/bin/env bash
# prometheus and promtool for the tests of alerts and dashboards, without installing them: those in the PATH, or the
# binaries of Debian's package.
#   prometheus.sh [FOLDER]   (default: .venv/prometheus)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv/prometheus}
[ -x "$folder/promtool" ] && exit 0
mkdir -p "$folder"
if tool=$(command -v promtool) && server=$(command -v prometheus); then
  ln -sf "$server" "$tool" "$folder/"
  exit 0
fi
command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo 'prometheus: neither promtool nor apt-get is here' >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { (cd "$work" && apt-get -q download prometheus >/dev/null 2>&1); }
fetch || { [ "$(id -u)" = 0 ] && apt-get update -qq >/dev/null 2>&1 && fetch; } || { echo 'prometheus: apt-get download prometheus failed' >&2; exit 1; }
dpkg -x "$work"/prometheus_*.deb "$work/files"
cp "$work/files/usr/bin/prometheus" "$work/files/usr/bin/promtool" "$folder/"
