"""A gateway with another model than the workers refuses every request, and says why."""

from __future__ import annotations

import pytest

from paceline.v1 import common_pb2
from services.client import AsyncPacelineClient, Unavailable
from tests.contract.gateway.conftest import MODEL_INFO, Start, eventually

BODY = {"prompt": "one two three", "max_tokens": 5}
CHAT = {"messages": [{"role": "user", "content": "one"}]}
OTHER = common_pb2.ModelInfo(name="llama", vocab_size=32000, max_model_len=2048, tokenizer_fingerprint="ab" * 32)


async def test_a_gateway_is_not_ready_and_names_both_models_until_they_are_the_same(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await start()
    running.scheduler.model = OTHER
    running.scheduler.break_streams()  # the gateway connects again, and the workers have another model

    async def told() -> bool:
        return "has the model" in (await running.http.get("/ready")).json().get("reason", "")

    await eventually(told)
    reason = (await running.http.get("/ready")).json()["reason"]
    assert "checkpoint (vocab_size 1024, tokenizer " in reason
    assert "but the workers serve llama (vocab_size 32000, tokenizer abababababab)" in reason
    before = len(running.scheduler.submissions)
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        refused = await running.http.post(path, json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == reason
        assert refused.json()["error"]["reason"] == "model_mismatch"
        assert int(refused.headers["retry-after"]) > 0
    assert running.addresses.grpc is not None
    async with AsyncPacelineClient(running.addresses.grpc) as client:
        with pytest.raises(Unavailable, match="the workers serve llama"):
            await client.generate("one two three", max_tokens=5)
    assert len(running.scheduler.submissions) == before, "none has reached the scheduler"
    assert capsys.readouterr().out.count("not ready: the workers serve another model") == 1
    running.scheduler.model = MODEL_INFO
    running.scheduler.break_streams()
    await running.until_ready()
    assert (await running.http.post("/v1/completions", json=BODY)).status_code == 200
