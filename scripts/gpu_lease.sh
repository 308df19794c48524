#!/usr/bin/env bash
# On a borrowed GPU machine without a network, for a checkout that is not installed there (docs/gpu.md):
#
#   scripts/gpu_lease.sh wheels TOOLS   here, beforehand: .whl/ with what the machine lacks. TOOLS has make_wheels.sh
#   scripts/gpu_lease.sh check          there, up to 4 minutes: a few kernels, and whether a worker of full size starts
#   scripts/gpu_lease.sh tests          there, up to 9.5 minutes: tests/gpu, a process for each file
#   scripts/gpu_lease.sh sanitize       there, up to 9.5 minutes: NVIDIA's compute-sanitizer on the tests of the kernels
#   scripts/gpu_lease.sh bench [ARGS]   there, 5 minutes: one model. ARGS go to bench.gpu
#
# The results of the last four are in $OUT.
set -uo pipefail
cd "$(dirname "$0")/.."
# The kernels that tests/gpu, the bench and models with heads of 64 or 128 need, with and without sliding windows.
sets=core,d128,d64,swa_d128,swa_d64

if [ "${1:-}" = wheels ]; then
  set -e
  "${2:?the folder with make_wheels.sh}/make_wheels.sh" --project . --aot "$sets"
  for name in protobuf pydantic pydantic-core pydantic-settings annotated-types typing-inspection typing-extensions \
    python-dotenv structlog orjson safetensors transformers llguidance PyYAML pytest pytest-asyncio pytest-timeout hypothesis; do
    pin=$(grep -iE "^${name//-/[-_]}==" constraints.txt | sed 's/+.*//')
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp -d .whl \
      --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "${pin:-$name}"
  done
  du -sh .whl
  exit
fi

part=${1:-}
case $part in check | tests | sanitize | bench) shift;; *) sed -n '2,10p' "$0" >&2; exit 2;; esac
. .whl/env.sh || exit
out=${OUT:?where the results go}
export PYTHONPATH=$PWD:$PWD/protos:$PYTHONPATH
export FLASHINFER_DISABLE_JIT=1  # a kernel that is missing fails at once, and is not compiled inside a test's time
status=0
case $part in
check)
  timeout 90 python3 .whl/smoke.py --budget 60 --only env,norm,rope,act,append,decode,prefill_fa2,graph --out "$out/smoke.json" || status=$?
  timeout 150 python3 -m bench.gpu --models llama-3.1-8b --budget 100 --out "$out/start.json" || status=$?;;
tests)
  for name in kernels sampling model system serving; do  # after an illegal access all else in a process fails
    timeout 112 python3 -m pytest "tests/gpu/test_$name.py" -o filterwarnings=default -p no:cacheprovider --durations=8 \
      --junitxml="$out/$name.xml" "$@" 2>&1 | tee "$out/$name.log" || status=$?
  done;;
sanitize)
  tool=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  timeout 560 "$tool" --tool memcheck --error-exitcode 9 --log-file "$out/sanitizer.log" python3 -m pytest \
    tests/gpu/test_kernels.py -x -o filterwarnings=default -p no:cacheprovider -o timeout=0 "$@" || status=$?;;
bench) timeout 590 python3 -m bench.gpu --models llama-3.1-8b --budget 280 --out "$out/gpu.json" "$@" || status=$?;;
esac
exit $status
