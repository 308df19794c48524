#!/usr/bin/env bash
# buf's STANDARD lint over protos/, and a breaking-change check against main. buf comes from npm.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v npm >/dev/null; then echo 'buf: skipped, there is no npm on this machine' >&2; exit 0; fi
home=.venv/buf
if [ ! -x "$home/node_modules/.bin/buf" ]; then npm install --silent --no-fund --no-audit --prefix "$home" @bufbuild/buf@1.75.0 >/dev/null; fi
buf=$home/node_modules/.bin/buf
"$buf" lint
for base in origin/main main; do
  if git rev-parse -q --verify "$base:protos" >/dev/null; then
    "$buf" breaking --against ".git#ref=$(git rev-parse "$base")"
    echo "buf: lint clean, nothing broken against $base"
    exit 0
  fi
done
echo 'buf: lint clean'
