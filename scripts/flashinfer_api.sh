#!/usr/bin/env bash
# FlashInfer's Python side, to be imported without a GPU: the contract tests bind the worker's calls against its real
# signatures, and compile its planner (four headers) for the host. 63 MiB to fetch, most of it CUDA sources of no use
# here; 82 MiB of Python and tvm-ffi stay on disk.
# All of it is in a folder of its own, so that no worker on a CPU finds it, and pip does not ask for CUDA packages.
#   flashinfer_api.sh [FOLDER]   (default: .venv/flashinfer-api)
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
folder=${1:-.venv/flashinfer-api}
packages=("$(grep ^flashinfer-python== constraints.txt)" apache-tvm-ffi==0.1.15.post2 requests==2.32.5 urllib3==2.8.0 charset-normalizer==3.5.2 nvidia-ml-py==13.615.71)
contents="${packages[*]}, headers of the planner"
if [ "$(cat "$folder/packages" 2>/dev/null)" = "$contents" ]; then touch "$folder/packages"; exit 0; fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
python -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: -d "$wheels" "${packages[@]}"
rm -rf "$folder"
python - "$wheels" "$folder" <<'P'
import sys
import zipfile
from pathlib import Path

unused = ("data/", "moe_ep/")
include = "flashinfer/data/include/flashinfer/"
headers = [include + name for name in ("allocator.h", "exception.h", "utils.cuh", "attention/scheduler.cuh")]
for wheel in Path(sys.argv[1]).glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if wheel.name.startswith("flashinfer_python"):
            names = [n for n in names if n.endswith(".py") and not n.removeprefix("flashinfer/").startswith(unused)]
            names += headers
        archive.extractall(sys.argv[2], names)
P
echo "$contents" > "$folder/packages"
