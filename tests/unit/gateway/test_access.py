"""What a key allows: tenants, priorities, quotas; and which calls need a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.v1 import inference_pb2
from services.gateway.access.caller import ANYONE, Caller
from services.gateway.access.control import AccessControl
from services.gateway.access.quotas import Quotas
from services.gateway.errors import ApiError
from services.gateway.outcome import SequenceOutcome
from services.runtime.keys.entries import ApiKey, entry_text, hash_of, make_key
from services.runtime.keys.source import KeySource

SECRET = "s" * 40


def make(**fields: Any) -> ApiKey:
    return make_key("a", sha256=hash_of(SECRET), **{"tenant": "acme", **fields})


def outcome(output_tokens: int, status: int = 200) -> SequenceOutcome:
    return SequenceOutcome(
        request_id="r",
        answer_id="",
        endpoint="chat",
        sample=0,
        tenant="",
        finish_reason="length",
        status=status,
        message="",
        queue_limit=None,
        prompt_tokens=1,
        output_tokens=output_tokens,
        cached_tokens=None,
        ttft_s=None,
        tpot_s=None,
        latency_s=0.0,
        timing=None,
        num_submissions=1,
    )


# ── tenant and priority ──────────────────────────────────────────────────────────────────────────────────────────────


def permitted(key: ApiKey | None, named: str = "", user: str = "", priority: float = 0.0) -> str:
    """The request's tenant; the gateway writes `user` into the metadata where no tenant is named."""
    metadata = inference_pb2.Submission(tenant=named or user, priority=priority)
    return Caller(key).permit(metadata, named or None).tenant


def test_without_keys_a_request_names_its_tenant() -> None:
    assert permitted(None, "x", priority=9.0) == "x"
    assert permitted(None, user="u") == "u"
    assert ANYONE.owner == ""


def test_a_keys_tenant_is_the_requests_tenant() -> None:
    assert permitted(make()) == permitted(make(), "acme") == "acme"
    assert permitted(make(), user="end user 7") == "acme"
    with pytest.raises(ApiError, match="tenant: the key 'a' is for the tenant 'acme', not for 'other'") as refused:
        permitted(make(), "other")
    assert (refused.value.status, refused.value.param, refused.value.code) == (403, "tenant", "tenant_not_allowed")


def test_a_key_for_any_tenant_lets_the_request_name_its_tenant() -> None:
    key = make(any_tenant=True)
    assert [permitted(key), permitted(key, "other"), permitted(key, user="u")] == ["acme", "other", "u"]


def test_a_priority_above_the_ceiling_is_refused() -> None:
    assert permitted(make(max_priority=2), priority=2.0) == "acme"
    assert permitted(make(), priority=-5.0) == "acme"
    assert permitted(make(max_priority=0.1), priority=0.1) == "acme"
    assert permitted(make(max_priority=float("inf")), priority=3e38) == "acme"
    for key, priority in ((make(), 0.5), (make(max_priority=2), 2.5), (make(max_priority=-1), 0.0)):
        with pytest.raises(ApiError, match=f"priority: {priority:g} is above {key.max_priority:g}") as refused:
            permitted(key, priority=priority)
        assert (refused.value.status, refused.value.param) == (403, "priority")


# ── quotas ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rig:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.quotas = Quotas(lambda: self.now_s)

    def enter(self, key: ApiKey, *, new: bool = True) -> None:
        with self.quotas.entering(key, new=new):
            pass


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_key_without_quotas_is_not_charged(rig: Rig) -> None:
    assert rig.quotas.charge(make(), num_sequences=1, prompt=1, output=1) is None
    assert rig.quotas.charge(None, num_sequences=1, prompt=1, output=1) is None
    with rig.quotas.entering(None, new=True), rig.quotas.entering(make(), new=True):
        pass
    assert not rig.quotas._usages


def test_a_key_has_a_limit_of_requests_at_a_time(rig: Rig) -> None:
    key = make(max_requests=2)
    first = rig.quotas.charge(key, num_sequences=2, prompt=1, output=1)
    assert first is not None
    with rig.quotas.entering(key, new=True):
        with pytest.raises(ApiError, match=r"limit of 2 requests at a time \(max_requests\)") as refused:
            rig.enter(key)
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1.0)
        rig.enter(key, new=False)  # the client may ask again for its running request
    second = rig.quotas.charge(key, num_sequences=1, prompt=1, output=1)
    assert second is not None
    with pytest.raises(ApiError, match="max_requests"):
        rig.quotas.charge(key, num_sequences=1, prompt=1, output=1)
    first.ended(outcome(1))
    with pytest.raises(ApiError, match="max_requests"):
        rig.enter(key)
    first.ended(outcome(1))  # the last sequence
    rig.enter(key)
    second.cancel()
    second.cancel()
    with rig.quotas.entering(key, new=True):
        rig.enter(key)


@pytest.mark.parametrize(
    ("quota", "num_tokens", "offline", "online"),
    [
        ({"max_requests": 3}, 1, [True, True, False], [True, False]),
        ({"max_requests": 1}, 1, [True, False], [False]),
        ({"max_tokens_in_flight": 100}, 30, [True, False], [True, True, False]),
        ({"max_tokens_in_flight": 100}, 60, [True, False], [False]),
        ({"tokens_per_minute": 600}, 200, [True, True, False], [True, False]),
    ],
)
def test_offline_requests_leave_half_of_each_quota(
    rig: Rig, quota: dict[str, int], num_tokens: int, offline: list[bool], online: list[bool]
) -> None:
    """An offline request that is larger than half of a quota runs alone."""
    key = make(**quota)

    def charge(is_offline: bool) -> bool:
        try:
            rig.quotas.charge(key, num_sequences=1, prompt=num_tokens, output=1, offline=is_offline)
        except ApiError:
            return False
        return True

    assert [charge(True) for _ in offline] == offline
    assert [charge(False) for _ in online] == online


@pytest.mark.parametrize(("limit", "share"), [(1, ""), (2, ", of which offline requests get half")])
def test_the_refusal_of_an_offline_request_names_its_share(rig: Rig, limit: int, share: str) -> None:
    """An offline request may use a limit of 1."""
    key = make(max_requests=limit)
    rig.quotas.charge(key, num_sequences=1, prompt=1, output=1, offline=True)
    with pytest.raises(ApiError) as refused:
        rig.quotas.charge(key, num_sequences=1, prompt=1, output=1, offline=True)
    assert refused.value.message == f"the key 'a' is at its limit of {limit} requests at a time{share} (max_requests)"


def test_retried_requests_cannot_fill_the_parse_limiter(rig: Rig) -> None:
    key = make(max_requests=1)
    with rig.quotas.entering(key, new=False), pytest.raises(ApiError, match="max_requests"):
        rig.enter(key, new=False)


def test_a_key_has_a_limit_of_tokens_in_flight(rig: Rig) -> None:
    key = make(max_tokens_in_flight=100)
    first = rig.quotas.charge(key, num_sequences=1, prompt=10, output=50)
    assert first is not None
    with pytest.raises(ApiError, match=r"limit of 100 tokens in flight \(max_tokens_in_flight\)") as refused:
        rig.quotas.charge(key, num_sequences=1, prompt=10, output=31)
    assert refused.value.status == 429
    assert rig.quotas.charge(key, num_sequences=1, prompt=10, output=30) is not None
    with pytest.raises(ApiError, match=r"may reach 101 tokens.* may have 100 tokens in flight") as refused:
        rig.quotas.charge(key, num_sequences=1, prompt=1, output=100)
    assert (refused.value.status, refused.value.param) == (400, "max_tokens")  # no retry could help
    first.ended(outcome(3))
    assert rig.quotas.charge(key, num_sequences=1, prompt=10, output=50) is not None


def test_a_key_has_a_limit_of_tokens_per_minute(rig: Rig) -> None:
    key = make(tokens_per_minute=600)
    charge = rig.quotas.charge(key, num_sequences=1, prompt=400, output=1000)
    assert charge is not None
    charge.ended(outcome(500))  # 300 more than were left
    with pytest.raises(ApiError, match=r"limit of 600 tokens per minute \(tokens_per_minute\)") as refused:
        rig.enter(key)
    assert refused.value.status == 429
    assert refused.value.retry_after_s == pytest.approx(30.1)  # 301 tokens
    rig.enter(key, new=False)  # an answer that is kept may be read
    rig.now_s += refused.value.retry_after_s or 0.0
    rig.enter(key)
    rig.now_s += 3600
    rig.enter(key)
    assert rig.quotas._usages["a"].tokens_left == 600  # an idle key saves up no more than one minute


def test_a_request_that_was_not_served_is_not_charged(rig: Rig) -> None:
    key = make(tokens_per_minute=600)
    for status in (429, 503):
        charge = rig.quotas.charge(key, num_sequences=1, prompt=500, output=10)
        assert charge is not None
        charge.ended(outcome(0, status))
    charge = rig.quotas.charge(key, num_sequences=2, prompt=500, output=10)
    assert charge is not None
    charge.cancel()
    assert rig.quotas._usages["a"].tokens_left == 600
    charge = rig.quotas.charge(key, num_sequences=1, prompt=100, output=10, delivered=7)
    assert charge is not None
    charge.ended(outcome(10))  # of these, 7 came from another run
    assert rig.quotas._usages["a"].tokens_left == 600 - 100 - 3


def test_a_changed_limit_holds_for_the_next_request(rig: Rig) -> None:
    charge = rig.quotas.charge(make(max_requests=9), num_sequences=1, prompt=5000, output=1)
    assert charge is not None
    charge.ended(outcome(5000))
    rig.enter(make(tokens_per_minute=10))  # what ran without this limit does not count
    rig.quotas.charge(make(max_requests=9), num_sequences=1, prompt=1, output=1)
    with pytest.raises(ApiError, match="1 requests at a time"):
        rig.enter(make(max_requests=1))


# ── which calls need a key ───────────────────────────────────────────────────────────────────────────────────────────


def access(tmp_path: Path, *, open_metrics: bool = False, **fields: Any) -> AccessControl:
    path = tmp_path / "keys.toml"
    path.write_text(entry_text(make(**fields)))
    return AccessControl(KeySource(path, []), open_metrics=open_metrics, clock=lambda: 0.0)


SHOWN = [(b"authorization", b"Bearer " + SECRET.encode())]


def test_without_keys_anyone_may_call() -> None:
    control = AccessControl()
    assert control.admit("/v1/models", []) is control.identify([("x-api-key", "x")]) is ANYONE


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/models",
        "/tokenize",
        "/version",
        "/nothing",
        "/health/",
    ],
)
def test_every_other_path_needs_a_key(tmp_path: Path, path: str) -> None:
    control = access(tmp_path)
    assert control.admit(path, SHOWN).owner == "a"
    for headers, code, challenge in (
        ([], "missing_api_key", 'Bearer realm="paceline"'),
        ([(b"x-api-key", b"wrong")], "invalid_api_key", 'Bearer realm="paceline", error="invalid_token"'),
    ):
        with pytest.raises(ApiError) as refused:
            control.admit(path, headers)
        assert (refused.value.status, refused.value.code) == (401, code)
        assert refused.value.headers == {"www-authenticate": challenge}
    assert control.num_refused == 2


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_is_open(tmp_path: Path, path: str) -> None:
    assert access(tmp_path).admit(path, [(b"x-api-key", b"wrong")]) is ANYONE


def test_metrics_need_a_key_with_the_right_to_read_them(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="may not read metrics") as refused:
        access(tmp_path).admit("/metrics", SHOWN)
    assert refused.value.status == 403
    for right in ("metrics", "admin"):
        assert access(tmp_path, **{right: True}).admit("/metrics", SHOWN).owner == "a"
    with pytest.raises(ApiError):
        access(tmp_path, metrics=True).admit("/metrics", [])
    assert access(tmp_path, open_metrics=True).admit("/metrics", []) is ANYONE


@pytest.mark.parametrize("path", ["/health", "/ping", "/assets/x", "/v1/models"])
@pytest.mark.parametrize(("right", "knows"), [({}, False), ({"metrics": True}, True), ({"admin": True}, True)])
def test_the_load_is_known_to_keys_that_read_metrics_and_not_without_a_key(
    tmp_path: Path, path: str, right: dict[str, bool], knows: bool
) -> None:
    control = access(tmp_path, **right)
    caller = control.admit(path, SHOWN)
    assert control.may_know_load(caller) == (knows and caller is not ANYONE)
    assert not control.may_know_load(ANYONE)
    assert access(tmp_path, open_metrics=True).may_know_load(ANYONE)
    assert AccessControl().may_know_load(ANYONE)
