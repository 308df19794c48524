#!/usr/bin/env bash
# Builds the site of docs/ into build/site; `docs.sh serve` shows the site and builds it again after each change.
# Diagrams need mermaid (3.6 MB of JavaScript), which npm fetches. Without npm, browsers load mermaid from a CDN.
set -euo pipefail
cd "$(dirname "$0")/.."
home=.venv/mermaid
version=11.17.2
if [ ! -s "$home/mermaid.min.js" ] || [ "$(cat "$home/version")" != "$version" ]; then
  rm -rf "$home"
  mkdir -p "$home"
  if command -v npm >/dev/null && (cd "$home" && npm pack --silent "mermaid@$version" >/dev/null 2>&1); then
    tar -xzf "$home/mermaid-$version.tgz" -C "$home" --strip-components 2 package/dist/mermaid.min.js
    rm "$home/mermaid-$version.tgz"
    echo "$version" > "$home/version"
  else
    echo 'docs: npm cannot fetch mermaid, so browsers load it from a CDN' >&2
  fi
fi
export NO_MKDOCS_2_WARNING=1  # Material's advertisement in every build
if [ "${1:-}" = serve ]; then exec .venv/bin/python -m mkdocs serve; fi
.venv/bin/python -m mkdocs build --strict
echo 'docs: the site is in build/site, all links lead somewhere'
