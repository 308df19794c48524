"""The file of a trace: what Perfetto requires of it, and times on one clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from services.cli.trace.chrome import chrome_trace
from services.cli.trace.main import PROG, main
from services.cli.trace.records import read_records
from tests.support.traces import check_trace

SCHEDULER_US, WORKER_US, CACHE_US = 1_000_000, 50_000_000, -3_000_000  # ahead of the gateway's clock


def step(number: int, sent_us: int, **other: Any) -> dict[str, Any]:
    """Sent at this time of the gateway's clock. It takes 100 µs to the worker, runs 1 ms and is back after 100 µs."""
    own, far = sent_us + SCHEDULER_US, sent_us + WORKER_US
    return {
        "worker": 3, "name": "w", "step": number, "planned_us": own - 200, "sent_us": own, "ended_us": own + 1300,
        "received_us": far + 100, "started_us": far + 150, "finished_us": far + 1150, "result_sent_us": far + 1200,
        "num_decodes": 2, "num_prefills": 0, "new_tokens": 0, "context_tokens": 40, **other,
    }  # fmt: skip


def record(epoch: int = 7, at_us: int = 0, **scheduler: Any) -> dict[str, Any]:
    return {
        "gateway": {"at_us": at_us, "messages": [], "written": [], "requests": []},
        "scheduler": {
            "asked_us": at_us, "received_us": at_us + 50 + SCHEDULER_US, "sent_us": at_us + 60 + SCHEDULER_US,
            "got_us": at_us + 110, "epoch": epoch, "steps": [], "exchanges": [], "runs": [], "num_missed": 0,
            **scheduler,
        },
    }  # fmt: skip


def named(content: dict[str, Any], name: str, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if (event["name"], event["ph"]) == (name, phase)]


def test_all_times_are_on_one_clock() -> None:
    exchange = {"sent_us": 1800 + SCHEDULER_US, "ended_us": 2000 + SCHEDULER_US, "received_us": 1850 + CACHE_US,
                "answered_us": 1950 + CACHE_US, "num_ops": 4}  # fmt: skip
    run = {"began_us": 1700 + SCHEDULER_US, "applied_us": 1750 + SCHEDULER_US, "ended_us": 1800 + SCHEDULER_US,
           "event": "tick", "num_plans": 0, "num_exchanges": 1}  # fmt: skip
    content = chrome_trace(read_records([record(), record(steps=[step(9, 2000)], exchanges=[exchange], runs=[run])]))
    check_trace(content)
    [compute], [apply] = named(content, "step 9"), named(content, "apply")
    [plan], [planned] = named(content, "plan"), named(content, "at the worker", "b")
    # The trace begins with the run, at 1,700 µs of the gateway's clock.
    assert (compute["ts"], compute["dur"]) == (pytest.approx(450, abs=1), 1000)
    assert (apply["ts"], apply["dur"]) == (pytest.approx(150, abs=1), 100)
    assert (plan["ts"], plan["dur"]) == (50, 50)
    assert planned["ts"] == 300
    about = content["otherData"]
    assert about["clock_offsets_us"] == {
        "scheduler": SCHEDULER_US, "cache": CACHE_US, "worker 3 (w)": pytest.approx(WORKER_US, abs=1)
    }  # fmt: skip
    assert about["clock_errors_us"]["scheduler"] == 50


def test_plans_in_flight_are_counted() -> None:
    waits = {"started_us": 1150 + WORKER_US}, {"started_us": 1700 + WORKER_US}  # one step computes at a time
    steps = [step(1, 0), step(2, 500, **waits[0]), step(3, 1400, **waits[1])]
    content = chrome_trace(read_records([record(steps=steps)]))
    check_trace(content)
    counts = [event["args"]["value"] for event in content["traceEvents"] if event["ph"] == "C"]
    assert counts == [1, 2, 1, 2, 1, 0]


def test_a_step_that_was_planned_before_the_trace_has_no_times_of_the_worker() -> None:
    content = chrome_trace(read_records([record(steps=[step(1, 0, received_us=0, result_sent_us=0), step(2, 2000)])]))
    check_trace(content)
    assert not named(content, "step 1")
    assert len(named(content, "step 1", "b")) == 1
    assert len(named(content, "step 2")) == 1


def test_a_restarted_scheduler_has_its_own_clock_and_tracks() -> None:
    other = record(epoch=8, at_us=9000)
    other["scheduler"].update({"received_us": 9050, "sent_us": 9060})
    lost = {"gateway": record()["gateway"], "scheduler": None}
    content = chrome_trace(read_records([record(steps=[step(1, 0)]), lost, other]))
    check_trace(content)
    offsets = content["otherData"]["clock_offsets_us"]
    assert (offsets["scheduler (epoch 7)"], offsets["scheduler (epoch 8)"]) == (SCHEDULER_US, 0)


def test_a_request_shows_its_phases() -> None:
    one = record()
    one["gateway"]["requests"] = [
        {"request_id": "r", "answer_id": "cmpl-r", "endpoint": "completions", "tenant": "t", "finish_reason": "stop",
         "ended_us": 5_000_000, "latency_s": 3.0, "queue_s": 0.5, "ttft_s": 1.0, "prompt_tokens": 5,
         "cached_tokens": None, "output_tokens": 7}
    ]  # fmt: skip
    one["gateway"]["written"] = [{"began_us": 2_500_000, "ended_us": 2_500_010, "num_tokens": 3}]
    content = chrome_trace(read_records([one]))
    check_trace(content)
    begun = {event["name"]: event["ts"] for event in content["traceEvents"] if event["ph"] == "b"}
    assert begun == {"completions": 0, "queued": 0, "prompt": 500_000, "output": 1_000_000}
    assert Counter(event["ph"] for event in content["traceEvents"])["e"] == 4


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "x"])
def test_a_wrong_time_gets_one_error_line(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["out.json", f"--seconds={seconds}"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"{PROG}: argument --seconds: a number above 0 and at most 60 is needed (got {seconds!r}) (see --help)\n"
    )


def test_a_file_that_cannot_be_written_is_refused_before_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/no/such/folder/out.json", "--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == f"{PROG}: /no/such/folder/out.json: cannot be written\n"
