"""Without API keys, only this machine changes policies, wherever the gateway listens."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from services.gateway.errors import ApiError
from services.gateway.live_view.policies import check_local, why_not_settable


def request_from(host: str) -> Request:
    return Request({"type": "http", "headers": [], "client": (host, 5000), "state": {}})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_request_from_this_machine_may_change_policies(host: str) -> None:
    check_local(request_from(host))
    assert why_not_settable(request_from(host)) is None


@pytest.mark.parametrize("host", ["10.0.0.7", "2001:db8::1", ""])
def test_a_request_from_another_machine_may_not_change_policies(host: str) -> None:
    with pytest.raises(ApiError, match="only from the gateway's own machine") as refused:
        check_local(request_from(host))
    assert (refused.value.status, refused.value.code) == (403, "admin_required")
    assert why_not_settable(request_from(host)) == refused.value.message
    assert "docs/keys.md" in refused.value.message
