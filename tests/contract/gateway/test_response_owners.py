"""With API keys, a response belongs to the key that made it, at every gateway; quotas count responses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contract.gateway.conftest import Running, Start, until
from tests.contract.gateway.test_keys import Keys, bearer

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "x", "max_output_tokens": 5, "ignore_eos": True}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.toml")


async def launch(start: Start, keys: Keys, tmp_path: Path, **scheduler: Any) -> Running:
    settings = {"keys_file": str(keys.path), "response_store": f"sqlite:///{tmp_path}/responses.db", "drain_s": 0.0}
    return await start(settings=settings, **scheduler)


async def test_a_foreign_response_is_not_found(start: Start, keys: Keys, tmp_path: Path) -> None:
    ann, bob = keys.add("ann"), keys.add("bob")
    running = await launch(start, keys, tmp_path)
    other = await launch(start, keys, tmp_path)
    made = (await running.http.post(PATH, json=BODY, headers=bearer(ann))).json()
    running.scheduler.paused = True
    waiting = (await running.http.post(PATH, json=BODY | {"background": True}, headers=bearer(ann))).json()
    for gateway in (running, other):
        for response_id in (made["id"], waiting["id"]):
            path = f"{PATH}/{response_id}"
            for method, query in (
                ("GET", ""),
                ("GET", "?stream=true"),
                ("GET", "?stream=true&starting_after=3"),
                ("POST", "/cancel"),
                ("GET", "/input_items"),
                ("DELETE", ""),
            ):
                answer = await gateway.http.request(method, path + query, headers=bearer(bob))
                unknown = await gateway.http.request(method, f"{PATH}/resp_0{query}", headers=bearer(bob))
                assert answer.status_code == unknown.status_code == 404
                assert answer.text.replace(response_id, "resp_0") == unknown.text
                assert (await gateway.http.request(method, path + query)).status_code == 401
        continued = BODY | {"previous_response_id": made["id"]}
        assert (await gateway.http.post(PATH, json=continued, headers=bearer(bob))).status_code == 404
    running.scheduler.paused = False
    assert (await other.http.get(f"{PATH}/{made['id']}", headers=bearer(ann))).json() == made
    assert (await other.http.post(PATH, json=continued, headers=bearer(ann))).status_code == 200
    assert not (other.scheduler.submissions[:-1]), "a foreign request generates nothing"


async def test_idempotency_keys_of_two_owners_do_not_meet(start: Start, keys: Keys, tmp_path: Path) -> None:
    ann, bob = keys.add("ann"), keys.add("bob")
    running = await launch(start, keys, tmp_path)
    answers = [
        (await running.http.post(PATH, json=BODY, headers=bearer(secret, **{"Idempotency-Key": "k"}))).json()
        for secret in (ann, bob)
    ]
    assert answers[0]["id"] != answers[1]["id"]
    assert answers[0]["output"][0]["content"] != answers[1]["output"][0]["content"]


async def test_quotas_count_responses(start: Start, keys: Keys, tmp_path: Path) -> None:
    ann = keys.add("ann", max_requests=1)
    running = await launch(start, keys, tmp_path)
    other = await launch(start, keys, tmp_path)
    running.scheduler.paused = True
    waiting = (await running.http.post(PATH, json=BODY | {"background": True}, headers=bearer(ann))).json()
    answer = await running.http.post(PATH, json=BODY, headers=bearer(ann))
    assert (answer.status_code, "max_requests" in answer.text) == (429, True)
    assert (await running.http.get(f"{PATH}/{waiting['id']}", headers=bearer(ann))).status_code == 200
    # Another gateway counts for itself, and its generation of the same response counts, too.
    other.scheduler.paused = True
    async with other.http.stream("GET", f"{PATH}/{waiting['id']}?stream=true", headers=bearer(ann)) as stream:
        assert stream.status_code == 200
        await until(lambda: other.scheduler.num_running == 1)
        assert (await other.http.post(PATH, json=BODY, headers=bearer(ann))).status_code == 429
        other.scheduler.paused = running.scheduler.paused = False
        await stream.aread()
    assert (await other.http.post(PATH, json=BODY, headers=bearer(ann))).status_code == 200


async def test_a_response_of_a_removed_key_is_not_taken_over(start: Start, keys: Keys, tmp_path: Path) -> None:
    ann = keys.add("ann")
    keys.add("bob")
    first = await launch(start, keys, tmp_path)
    first.scheduler.paused = True
    await first.http.post(PATH, json=BODY | {"background": True}, headers=bearer(ann))
    keys.remove("ann")
    second = await launch(start, keys, tmp_path)
    first.stop.set()
    await first.task
    await asyncio.sleep(1.5)  # a gateway looks for abandoned responses each second
    assert not second.scheduler.submissions
    keys.add("ann")
    await until(lambda: len(second.scheduler.submissions) == 1)
