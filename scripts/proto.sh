#!/usr/bin/env bash
# Generate the modules and type stubs of protos/. With --check: fail if what is committed is not what comes out.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
out=protos
if [ "${1:-}" = --check ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
python -m grpc_tools.protoc -Iprotos --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  protos/paceline/v1/*.proto protos/paceline/third_party/*.proto
[ "$out" = protos ] && exit 0
for file in "$out"/paceline/*/*; do
  cmp -s "$file" "protos/${file#"$out"/}" || { echo "proto: $(basename "$file") is stale: run make proto" >&2; exit 1; }
done
echo 'proto: generated code is up to date'
