"""The compiled kernels for CPUs compute what torch computes, and each row by itself."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite.binding import get_host_cpu_name
from numba import njit

from gpu_worker.cpu import compiling
from gpu_worker.cpu.attention import CpuAttention
from gpu_worker.cpu.kernels import Kernels
from gpu_worker.cpu.layer_kernels import silu_and_mul
from gpu_worker.cpu.matmul import PackedMatmul, packed, packing
from gpu_worker.cpu.numbers import FASTMATH, as_array, exp, largest, load, store
from gpu_worker.cpu.ops import CpuOps
from gpu_worker.kv.pool import allocate_pool
from gpu_worker.models.config import DecoderConfig, RopeConfig
from gpu_worker.models.matmul import PlainMatmul
from gpu_worker.models.ops import TorchOps
from tests.support.attention import dense, fill, metadata_of
from tests.unit.worker.ready_kernels import ready_kernels

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]
# Kernels that promise the same bits for a row in every batch.
SAME_BITS: dict[str, Callable[[torch.dtype], Kernels]] = {
    "one thread": lambda dtype: Kernels(dtype, 1),
    "two threads": lambda dtype: Kernels(dtype, 2, by_size=False),
}
# Rows for which a kernel uses one thread, and several.
COUNTS = (1, 5, 300)


@njit(fastmath=FASTMATH)
def _exp_all(numbers: Any, out: Any) -> None:
    for i in range(len(numbers)):
        out[i] = exp(numbers[i])


@njit
def _store_all(numbers: Any, out: Any) -> None:
    for i in range(len(numbers)):
        store(out, i, numbers[i])


@njit
def _load_all(numbers: Any, out: Any) -> None:
    for i in range(len(numbers)):
        out[i] = load(numbers[i])


def _config(head_dim: int = 16) -> DecoderConfig:
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=99,
        hidden_size=48,
        intermediate_size=40,
        num_layers=1,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig("default", 10_000.0),
        max_positions=512,
        tie_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        windows=(0,),
        eos_token_ids=(),
        dtype="float32",
    )


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, summed: float = 0.0) -> None:
    """`exact` is of float32 arithmetic. Ours may differ by one rounding to `dtype`, and sums by `summed` more."""
    assert ours.dtype == dtype
    rounding = 2**-8 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(ours.float(), exact.float(), rtol=rounding, atol=rounding / 8 + summed)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200))
@settings(max_examples=200, deadline=None)
def test_stored_numbers_are_rounded_as_torch_rounds_them(numbers: list[float]) -> None:
    array = np.array([*numbers, math.inf, -math.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.3895314e38], np.float32)
    ours = torch.empty(len(array), dtype=torch.bfloat16)
    _store_all(array, as_array(ours))
    expected = torch.from_numpy(array).to(torch.bfloat16)
    assert torch.equal(ours, expected)
    back = np.empty_like(array)
    _load_all(as_array(ours), back)
    assert np.array_equal(back, expected.float().numpy())


def test_nan_is_stored_as_nan() -> None:
    bits = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    ours = torch.empty(4, dtype=torch.bfloat16)
    _store_all(bits, as_array(ours))
    assert ours.isnan().all()


def test_the_exponential_is_precise_and_keeps_nan() -> None:
    numbers = np.concatenate((np.linspace(-87, 88, 100_001), [0.0, -1e-30])).astype(np.float32)
    ours = np.empty_like(numbers)
    _exp_all(numbers, ours)
    np.testing.assert_allclose(ours, np.exp(numbers.astype(np.float64)), rtol=2e-7)
    extreme = np.array([np.nan, -np.inf, -1e9, 1e9], np.float32)
    _exp_all(extreme, ours[:4])
    assert np.isnan(ours[0])
    assert 0 <= ours[1] == ours[2] < 2e-38
    assert ours[3] > 1e38


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=100))
@settings(max_examples=200, deadline=None)
def test_the_largest_number_is_found(numbers: list[float]) -> None:
    assert largest(np.array(numbers, np.float32)) == max(numbers)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 1, 40])
def test_the_softmax_of_a_chunk_hides_the_keys_behind_each_row(dtype: torch.dtype, window: int) -> None:
    rows, group, kv_heads, keys = 30, 3, 2, 70
    scores = 9 * _random(kv_heads * rows * group, keys, dtype=torch.float32)
    key = torch.arange(keys)
    row = (keys - rows + torch.arange(rows))[None, :, None, None]
    hidden = (key > row) | (key <= row - window if window else torch.tensor(False))
    masked = (scores / 4).view(kv_heads, rows, group, keys).masked_fill(hidden, -torch.inf)
    for threads in (1, 2):
        weights = scores.clone()
        ready_kernels(dtype, threads).mask_softmax(weights.numpy(), rows * group, group, window, np.float32(0.25))
        assert_close(weights, masked.softmax(-1).view_as(scores), torch.float32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("prefix", [75, 1400])
@pytest.mark.parametrize("window", [0, 100])
def test_a_chunk_of_bfloat16_is_as_precise_as_its_inputs(window: int, prefix: int, threads: int) -> None:
    """Scores and weights are not rounded to bfloat16, the result is."""
    dtype, count = torch.bfloat16, 150
    pool = allocate_pool(200, 8, 1, 2, 16, dtype, CPU)
    table = list(range(1, 1 + -(-(prefix + count) // 8)))
    full = _random(2, prefix + count, 2, 16, dtype=dtype)
    fill(pool.storage, 0, table, full[:, :prefix])
    query = 5 * _random(count, 6, 16, dtype=dtype, seed=1)
    attention = CpuAttention(pool, (window,), ready_kernels(dtype, threads))
    attention.plan(metadata_of(0, [(prefix, count)], [table], 8))
    out = attention.run(0, query, full[0, prefix:], full[1, prefix:])
    torch.testing.assert_close(out.double(), dense(query, full[0], full[1], window), atol=0.01, rtol=2**-8)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_layer_operations_agree_with_torch(dtype: torch.dtype, threads: int) -> None:
    config = _config()
    plain = TorchOps(config, 512, CPU)
    ours = CpuOps(config, 512, ready_kernels(dtype, threads))
    for rows in COUNTS:
        x, weight = _random(rows, 48, dtype=dtype), _random(48, dtype=dtype, seed=1)
        assert_close(ours.norm(x, weight), plain.norm(x.float(), weight.float()), dtype)
        gate_up = 4 * _random(rows, 80, dtype=dtype)
        assert_close(ours.silu_and_mul(gate_up), plain.silu_and_mul(gate_up.float()), dtype)
        positions = torch.arange(rows) * 7 % 512
        for norms in ((None, None), (_random(16, dtype=dtype, seed=2), _random(16, dtype=dtype, seed=3))):
            heads = _random(rows, 10, 16, dtype=dtype)
            wide = [None if norm is None else norm.float() for norm in norms]
            expected = plain.rotary(heads.float(), plain.angles(positions), *wide)
            values = heads[:, 8:].clone()
            for mine, other in zip(ours.rotary(heads, ours.angles(positions), *norms), expected, strict=True):
                assert_close(mine, other, dtype)
            assert torch.equal(heads[:, 8:], values)


@pytest.mark.parametrize("kernels", SAME_BITS)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype, kernels: str) -> None:
    config, rows = _config(), 300
    x, weight = _random(rows, 48, dtype=dtype), _random(48, dtype=dtype, seed=1)
    gate_up, positions = _random(rows, 80, dtype=dtype), torch.arange(rows)

    def computed(ops: CpuOps, which: slice) -> list[torch.Tensor]:
        heads = _random(rows, 10, 16, dtype=dtype)[which].clone()
        turned = ops.rotary(heads, ops.angles(positions[which]), None, None)
        return [ops.norm(x[which], weight), ops.silu_and_mul(gate_up[which]), *turned]

    ops = CpuOps(config, 512, SAME_BITS[kernels](dtype))
    whole = computed(ops, slice(None))
    for row in (0, 7, 299):
        for mine, other in zip(computed(ops, slice(row, row + 1)), whole, strict=True):
            assert torch.equal(mine[0], other[row])


@pytest.mark.parametrize("kernels", SAME_BITS)
@pytest.mark.parametrize("dtype", TYPES)
def test_decode_attention_does_not_depend_on_other_rows(dtype: torch.dtype, kernels: str) -> None:
    pool = allocate_pool(40, 8, 1, 2, 16, dtype, CPU)
    pool.storage.copy_(_random(*pool.storage.shape, dtype=dtype))
    lengths = [1, 8, 9, 40, 77]
    ids = iter(range(1, 41))
    tables = [[next(ids) for _ in range(-(-length // 8))] for length in lengths]
    query, new = _random(5, 6, 16, dtype=dtype), _random(2, 5, 2, 16, dtype=dtype, seed=1)

    def attended(which: list[int]) -> torch.Tensor:
        attention = CpuAttention(pool, (0,), SAME_BITS[kernels](dtype))
        attention.plan(metadata_of(len(which), [(lengths[i] - 1, 1) for i in which], [tables[i] for i in which], 8))
        return attention.run(0, query[which], new[0, which], new[1, which])

    whole = attended([0, 1, 2, 3, 4])
    assert torch.equal(attended([4, 2, 0, 1, 3]), whole[[4, 2, 0, 1, 3]])
    for i in range(5):
        assert torch.equal(attended([i])[0], whole[i])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("dtype", TYPES)
def test_only_rows_that_see_a_broken_value_are_broken(dtype: torch.dtype, window: int, bad: float) -> None:
    """Rows before it may be of a prefix that other requests share."""
    prefix, count, broken = 5, 150, 70
    pool = allocate_pool(40, 8, 1, 2, 16, dtype, CPU)
    table = list(range(1, 1 + -(-(prefix + count) // 8)))
    full = _random(2, prefix + count, 2, 16, dtype=dtype)
    fill(pool.storage, 0, table, full[:, :prefix])
    query = _random(count, 6, 16, dtype=dtype, seed=1)
    expected = dense(query, full[0], full[1], window)
    full[1, prefix + broken, 1, 3] = bad
    attention = CpuAttention(pool, (window,), ready_kernels(dtype, 1))
    attention.plan(metadata_of(0, [(prefix, count)], [table], 8))
    out = attention.run(0, query, full[0, prefix:], full[1, prefix:]).double()
    last = broken + (window or count)
    assert (~out.isfinite()).any(1).nonzero().flatten().tolist() == list(range(broken, min(last, count)))
    whole = [row for row in range(count) if not broken <= row < last]
    torch.testing.assert_close(out[whole], expected[whole], atol=0.01, rtol=2**-8)


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_in_a_row_stays_in_the_row(dtype: torch.dtype) -> None:
    ops = CpuOps(_config(), 512, ready_kernels(dtype, 1))
    x = _random(3, 48, dtype=dtype)
    x[1, 5] = torch.nan
    gate_up = _random(3, 80, dtype=dtype)
    gate_up[1, 7] = torch.nan
    assert ops.norm(x, torch.ones(48, dtype=dtype)).isnan().any(1).tolist() == [False, True, False]
    assert ops.silu_and_mul(gate_up).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [24, 4000])
def test_a_packed_matmul_agrees_with_the_plain_matmul(width: int, dtype: torch.dtype) -> None:
    if packing(CPU, dtype, few_rows=False) is None:
        pytest.skip(f"this CPU has no matmul of packed {dtype}")
    ours, plain = PackedMatmul(), PlainMatmul()
    weight, bias = _random(40, width, dtype=dtype) / width**0.5, _random(40, dtype=dtype, seed=1)
    assert packed(weight, few_rows=False).is_mkldnn == (width == 4000 or dtype == torch.bfloat16)
    for matrix in (packed(weight, few_rows=False), weight.t()):
        for count in (1, 8, 33):
            rows, total = _random(count, width, dtype=dtype, seed=2), _random(count, 40, dtype=dtype, seed=3)
            wide = rows.float(), weight.float().t()
            assert_close(ours.of(rows, matrix), plain.of(*wide), dtype, 1e-5)
            assert_close(ours.of(rows, matrix, bias), plain.of(*wide, bias.float()), dtype, 1e-5)
            out = torch.empty(count, 40, dtype=dtype)
            assert ours.of(rows, matrix, out=out) is out
            assert torch.equal(out, ours.of(rows, matrix))
            assert_close(ours.added(total.clone(), rows, matrix), plain.added(total.float(), *wide), dtype, 1e-5)


def test_matrices_are_packed_only_where_the_cpu_can_use_them() -> None:
    assert packing(torch.device("cuda"), torch.float32, few_rows=True) is None
    assert packing(CPU, torch.float16, few_rows=True) is None


def test_threads_are_those_of_the_setting_on_every_python_thread() -> None:
    """numba keeps its number of threads per Python thread. A worker is built in one thread and runs in another."""
    found: list[int] = []
    ops = CpuOps(_config(), 512, ready_kernels(torch.float32, 2))

    def run() -> None:
        numba.set_num_threads(1)
        ops.norm(torch.ones(300, 48), torch.ones(48))
        found.append(numba.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [min(2, numba.config.NUMBA_NUM_THREADS)]


def test_more_threads_than_cores_are_possible() -> None:
    ops = CpuOps(_config(), 512, Kernels(torch.float32, 4096))
    assert ops.norm(torch.ones(300, 48), torch.ones(48)).shape == (300, 48)


COMPILE = """
from numba import types
from gpu_worker.cpu.compiling import compiled
from gpu_worker.cpu.layer_kernels import silu_and_mul
matrix = types.Array(types.float32, 2, "C")
print(sum(compiled(silu_and_mul, (matrix, matrix), False).stats.cache_hits.values()))
"""


def compiled(folder: Path) -> tuple[int, str]:
    """The cache hits of a new process with this cache folder, and what the process printed."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return int(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_with_a_damaged_kernel_cache_a_start_compiles_again(tmp_path: Path) -> None:
    assert compiled(tmp_path)[0] == 0
    assert compiled(tmp_path)[0] == 1
    for index in tmp_path.rglob("*.nbi"):
        index.write_bytes(b"")
    hits, printed = compiled(tmp_path)
    assert hits == 0
    assert "a kernel is compiled at each start" in printed


SET = """
import sys
from gpu_worker.cpu.compiling import compile_in_child
from gpu_worker.cpu.layer_kernels import silu_and_mul
print("ready", flush=True)
sys.stdin.readline()
compile_in_child(silu_and_mul, sys.argv[1])
"""


def starting(folder: Path, code: str) -> subprocess.Popen[str]:
    """A process that compiles a set of kernels, with this code in place of theirs, as soon as it gets a line."""
    command, environment = [sys.executable, "-c", SET, code], os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_worker_waits_for_the_child_of_a_killed_one(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    say = f"import time; runs = open({str(runs)!r}, 'a', buffering=1); print('begun', file=runs)"
    code = f"{say}; time.sleep(2); print('ended', file=runs)"
    with starting(tmp_path, code) as killed:
        assert killed.stdin is not None
        killed.stdin.write("go\n")
        killed.stdin.flush()
        deadline = time.monotonic() + 60
        while not runs.exists() or not runs.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed.kill()
    starting(tmp_path, code).communicate("go\n", timeout=60)
    assert runs.read_text().split() == ["begun", "ended"] * 2


def test_workers_that_start_together_compile_a_set_of_kernels_once(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.write_text("")

    def run(count: int, end: str) -> str:
        code = f"import time; open({str(runs)!r}, 'a').write('.'); time.sleep(0.5); {end}"
        workers = [starting(tmp_path, code) for _ in range(count)]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.communicate("go\n", timeout=60)
            assert worker.returncode == 0
        return runs.read_text()

    assert run(1, "raise SystemExit(1)") == "."  # it has failed, so it is tried again
    assert run(1, "raise SystemExit(1)") == ".."
    assert run(3, "print('compiled')") == "..."
    assert run(1, "print('compiled')") == "..."


def test_without_locks_in_the_cache_folder_a_worker_compiles_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", fail)
    compiling.compile_in_child(silu_and_mul, "raise SystemExit(0)")
    assert "No locks available" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiling.compile_in_child(silu_and_mul, "raise SystemExit(7)")
    assert "ended with status 7" in capsys.readouterr().out
    compiling.compile_in_child(silu_and_mul, "import gpu_worker, sys; raise SystemExit('' in sys.path)")
    assert "warning" not in capsys.readouterr().out
    compiling.compile_in_child(silu_and_mul, "import gpu_worker, sys; raise SystemExit('' in sys.path)")
    assert capsys.readouterr().out == "", "it is in the cache"


BITS = """
import hashlib, sys, numpy as np, torch
from gpu_worker.cpu.chunk_attention import chunk_scratch
from gpu_worker.cpu.kernels import Kernels
from gpu_worker.cpu.vectors import has_vectors
from tests.unit.worker.small_decoders import SmallDecoder, config_of, content_of, step_of
wide_heads = has_vectors(torch.float32)
kernels = Kernels(torch.float32, int(sys.argv[1]), wide_heads=wide_heads)
numbers = np.random.default_rng(0)
rows = numbers.standard_normal((400, 300), np.float32)
kernels.norm(rows, rows[0].copy(), np.float32(1e-5), rows)
out, hidden = np.zeros((200, 512), np.float32), []
if wide_heads:
    pool = numbers.standard_normal((2, 20, 16, 2, 64), np.float32)
    query, scratch = numbers.standard_normal((200, 8, 64), np.float32), np.empty(chunk_scratch(320, 2, 64), np.float32)
    chunk = np.arange(20, dtype=np.int32), 0, 200, 320, 0, np.float32(0.125)
    kernels.attend_chunk(query, *pool, *chunk, scratch, scratch.copy(), kernels.attend_chunk.threads, out)
    step = step_of([(9, 1), (70, 3), (31, 1)])
    for at_once in (True, False):
        decoder = SmallDecoder(config_of(), torch.float32, int(sys.argv[1]), at_once=at_once)
        hidden.append(decoder.run(step, content_of(step, decoder.pool)).numpy().tobytes())
        assert not at_once or decoder.layers.runs[True] == 1
print(hashlib.sha256(rows.tobytes() + out.tobytes() + b"".join(hidden)).hexdigest())
"""


@pytest.mark.timeout(300)  # it compiles
@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_start_of_a_worker_computes_the_same_bits_as_later_ones(threads: int, tmp_path: Path) -> None:
    if threads > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("one core")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", BITS, str(threads)]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        for _ in range(2)
    )
    assert first.stdout.splitlines()[-1] == second.stdout.splitlines()[-1]


def test_cached_kernels_are_of_this_code_type_and_variant() -> None:
    """Without the version in their names, numba would reuse cached kernels of an older numbers.py."""
    sources = sorted(Path(compiling.__file__).parent.rglob("*.py"))
    assert {"numbers.py", "vectors.py", "kernels.py", "function.py"} < {source.name for source in sources}
    code = b"".join(source.read_bytes() for source in sources)
    assert code == compiling._SOURCES
    machine = repr(compiling._MACHINE)
    assert all(part in machine for part in (numba.__version__, get_host_cpu_name(), "avx"))
    assert hashlib.sha256(code + machine.encode()).hexdigest().startswith(compiling._VERSION)
    names = {
        kernel.__name__
        for ready in (ready_kernels(dtype, threads) for dtype in TYPES for threads in (1, 2))
        for kernel in (ready.norm._serial.py_func, ready.norm._parallel.py_func if ready.norm.threads > 1 else None)
        if kernel is not None
    }
    assert len(names) == 4
    assert all(name.endswith(compiling._VERSION) for name in names)
