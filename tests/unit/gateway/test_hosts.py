"""Which Host headers a server answers to."""

from __future__ import annotations

import pytest

from services.gateway.http.hosts import AllowedHosts
from services.gateway.settings import GatewaySettings
from services.runtime.settings import load_settings


def allows(hosts: AllowedHosts, *values: str) -> bool:
    return hosts.refusal([(b"accept", b"*/*"), *((b"host", value.encode()) for value in values)]) is None


@pytest.mark.parametrize(
    "bound_to", ["127.0.0.1", "localhost", "::1", "127.0.0.2", "::ffff:127.0.0.1", "ip6-localhost"]
)
def test_on_loopback_only_loopback_names_are_answered(bound_to: str) -> None:
    hosts = AllowedHosts([], bound_to)
    for name in ("localhost", "LOCALHOST", "localhost.", "app.localhost", "127.0.0.1", "127.1.2.3", "[::1]"):
        assert allows(hosts, name)
        assert allows(hosts, f"{name}:8000")
    assert allows(hosts), "a request without a Host header comes from no browser, so it is allowed"
    for name in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "10.0.0.1",
        "0.0.0.0",
    ):
        assert not allows(hosts, name)
        assert not allows(hosts, f"{name}:8000")
        assert not allows(hosts, "localhost", name), "each of several Host headers is checked"
    for value in ("", "localhost:80:80", "localhost@evil.example", "[::1", "local host", "[localhost]", "é"):
        assert not allows(hosts, value)


def test_elsewhere_every_name_is_answered_unless_the_operator_lists_them() -> None:
    for bound_to in ("0.0.0.0", "::", "10.0.0.1", "my-machine"):
        assert allows(AllowedHosts([], bound_to), "anything.example")
    hosts = AllowedHosts(["example.com", "*.example.org", "[::1]"], "0.0.0.0")
    for name in ("example.com", "Example.COM:443", "a.example.org", "a.b.example.org", "[::1]:80"):
        assert allows(hosts, name)
    for name in ("www.example.com", "example.org", "evilexample.org", "localhost", "127.0.0.1"):
        assert not allows(hosts, name)
    assert allows(AllowedHosts(["*"], "127.0.0.1"), "anything.example")
    assert not allows(AllowedHosts(["example.com"], "127.0.0.1"), "localhost"), "a list replaces the default names"


def test_prometheus_may_use_any_address_but_no_other_name() -> None:
    hosts = AllowedHosts(["example.com"], "0.0.0.0")
    answered = {
        host: hosts.refusal([(b"host", host.encode())], by_address=True) is None
        for host in ("172.18.0.4:8000", "[2001:db8::1]:8000", "example.com", "evil.example", "172.18.0.4.evil.example")
    }
    assert list(answered.values()) == [True, True, True, False, False]


def test_the_refusal_names_the_header_and_the_flag() -> None:
    error = AllowedHosts([], "127.0.0.1").refusal([(b"host", b"evil.example" + b"x" * 1000)])
    assert error is not None
    assert (error.status, error.code) == (403, "host_not_allowed")
    assert error.message.startswith("Host: 'evil.example")
    assert error.message.endswith("is not a name of this server; --allowed-hosts of the gateway lists its names")
    assert len(error.message) < 250


@pytest.mark.parametrize("value", ["example.com:80", "http://example.com", "*example.com", "a.*", "a b", "[x]"])
def test_a_list_with_an_entry_that_is_no_host_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(GatewaySettings, ["--allowed-hosts", f"example.com, {value}"])
    assert f"--allowed-hosts: {value!r} is no host" in capsys.readouterr().err
    assert load_settings(GatewaySettings, ["--allowed-hosts", " A.example , *.b,[::1]"]).hosts == [
        "a.example",
        "*.b",
        "[::1]",
    ]
