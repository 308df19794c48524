"""Asks a question as a batch. The client polls the gateways in turn, and records progress and results as events."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx

from tests.support.sse import Event

if TYPE_CHECKING:
    from tests.support.asking import Answer, Gateway

COMPLETION = "/v1/completions"
POLL_S = 0.1
HEAD = {"id": "", "created": 0, "model": "", "object": "batch"}


async def ask_batch(http: httpx.AsyncClient, gateways: Sequence[Gateway], answer: Answer) -> None:
    """Run the question's `lines` as a batch that the first gateway makes. Each poll asks the next gateway."""
    body = answer.question.body
    shared = {name: value for name, value in body.items() if name not in ("lines", "stream")}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": COMPLETION, "body": {**line, **shared}}
        for number, line in enumerate(body["lines"])
    ]
    url = gateways[0].url
    content = "\n".join(map(json.dumps, lines))
    form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
    file = (await http.post(f"{url}/v1/files", **form)).raise_for_status().json()  # type: ignore[arg-type]
    asked = {"input_file_id": file["id"], "endpoint": COMPLETION, "completion_window": "24h"}
    batch = (await http.post(f"{url}/v1/batches", json=asked)).raise_for_status().json()
    num_known = 0
    for gateway in itertools.cycle(gateways):
        await asyncio.sleep(POLL_S)
        try:
            batch = (await http.get(f"{gateway.url}/v1/batches/{batch['id']}")).raise_for_status().json()
            if (count := batch["request_counts"]["completed"]) > num_known:
                num_known = count
                answer.add(Event("", json.dumps({"type": "progress", "completed": count})))
            if batch["status"] == "completed":
                await _read(http, gateway, batch, answer)
                return
        except httpx.HTTPError:
            continue
        if batch["status"] not in ("validating", "in_progress", "finalizing"):
            answer.refusal = json.dumps(batch)
            return


async def _read(http: httpx.AsyncClient, gateway: Gateway, batch: dict[str, Any], answer: Answer) -> None:
    """Adds one event for each line of both files. If the files have two results for a line, its choice gets two finish
    reasons, so the comparison with the undisturbed answer fails."""
    results: list[dict[str, Any]] = []
    for file_id in (batch["output_file_id"], batch["error_file_id"]):
        if file_id is not None:
            content = (await http.get(f"{gateway.url}/v1/files/{file_id}/content")).raise_for_status().text
            results += map(json.loads, content.splitlines())
    for result in results:
        [choice] = result["response"]["body"].get("choices") or [
            {"text": json.dumps(result), "finish_reason": "error", "logprobs": None}
        ]
        answer.add(Event("", json.dumps(HEAD | {"choices": [choice | {"index": int(result["custom_id"])}]})))
    answer.is_done = True
