"""GET and POST /v1/policies: the gateway and the scheduler both check the caller, and the gateway passes the caller's
key on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.contract.gateway.conftest import Running, Start
from tests.contract.gateway.test_keys import Keys, bearer

POLICIES = "/v1/policies"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.toml")


async def test_policies_are_shown_and_changed(start: Start) -> None:
    running = await start()
    shown = (await running.http.get(POLICIES)).json()
    assert (shown["preset"], shown["policies"]["order"], shown["options"]) == ("paceline", "fcfs", {"watermark": 0.1})
    assert (shown["presets"], shown["known"]["order"]) == (["paceline", "sglang"], ["fcfs", "lpm"])
    assert shown["why_not_settable"] is None
    body = {"preset": None, "order": "lpm", "options": {"watermark": 0.2, "name": "x"}}
    changed = await running.http.post(POLICIES, json=body)
    assert (changed.status_code, changed.json()["policies"]["order"]) == (200, "lpm")
    assert changed.json()["options"] == {"watermark": 0.2, "name": "x"}
    assert running.scheduler.policies.order == "lpm"


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "preset"), ({"order": ""}, "preset"), ({"order": 3}, "order"), ({"ordre": "lpm"}, "ordre"), ([], None)],
)
async def test_a_body_without_a_legal_choice_changes_nothing(start: Start, body: Any, param: str | None) -> None:
    running = await start()
    refused = await running.http.post(POLICIES, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert not running.scheduler.admin_metadata


@pytest.mark.parametrize(
    ("code", "message", "status", "reason"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "order: there is no 'x'", 400, "invalid_policy"),
        (grpc.StatusCode.PERMISSION_DENIED, "only from the gateway's own machine", 403, "admin_required"),
        (grpc.StatusCode.UNAUTHENTICATED, "the API key is not known here", 403, "admin_required"),
        (grpc.StatusCode.INTERNAL, "a bug", 503, "service_unavailable"),
    ],
)
async def test_a_refusal_of_the_scheduler_reaches_the_caller(
    start: Start, code: grpc.StatusCode, message: str, status: int, reason: str
) -> None:
    running = await start()
    running.scheduler.admin_refusal = code, message
    for refused in (await running.http.get(POLICIES), await running.http.post(POLICIES, json={"order": "x"})):
        error = refused.json()["error"]
        assert (refused.status_code, error["reason"]) == (status, reason)
        assert (message in error["message"]) == (status != 503)
        assert error["param"] == ("order" if status == 400 else None)


async def test_only_an_admin_key_reaches_the_scheduler_and_is_passed_on(start: Start, keys: Keys) -> None:
    ann, root = keys.add("ann"), keys.add("root", admin=True)
    running = await start(settings={"keys_file": str(keys.path)})
    for refused in (
        await running.http.get(POLICIES, headers=bearer(ann)),
        await running.http.post(POLICIES, json={"order": "lpm"}, headers=bearer(ann)),
    ):
        assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "admin_required")
    assert not running.scheduler.admin_metadata
    assert (await running.http.get(POLICIES, headers={"x-api-key": root})).status_code == 200
    assert (await running.http.post(POLICIES, json={"order": "lpm"}, headers=bearer(root))).status_code == 200
    first, *others = running.scheduler.admin_metadata
    assert first["x-api-key"] == root
    assert {given["authorization"] for given in others} == {f"Bearer {root}"}


async def test_without_a_scheduler_policies_are_unavailable(start: Start) -> None:
    running = await start(scheduler_up=False)
    assert (await running.http.get(POLICIES)).status_code == 503


async def test_a_foreign_page_cannot_change_the_policies(running: Running) -> None:
    foreign = {"Origin": "https://page.example"}
    refused = await running.http.post(POLICIES, json={"order": "lpm"}, headers=foreign)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "origin_not_allowed")
