"""GET / and /assets/…: the page's files reach a browser with the right types, and without a key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.gateway.conftest import Running, Start
from tests.contract.gateway.test_keys import Keys

TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def references(html: str) -> list[str]:
    """What the page loads."""
    return re.findall(r'(?:src|href)="([^"]+)"', html)


async def test_the_page_loads_only_its_own_files(running: Running) -> None:
    page = await running.http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["cache-control"] == "no-cache"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page.text
    assert "style=" not in page.text
    files = references(page.text)
    assert len(files) >= 3
    for file in files:
        assert file.startswith("./assets/"), "relative, because a proxy may serve the gateway below a prefix"
        answer = await running.http.get(file[1:])
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(TYPES[file.rpartition(".")[2]])
        assert "immutable" in answer.headers["cache-control"]
        assert not re.search(rb"https?://(?!www\.w3\.org/)", answer.content), "works offline"
    assert (await running.http.head("/")).headers["content-length"] == str(len(page.content))


@pytest.mark.parametrize("name", ["nothing.js", "..%2Findex.html", "../index.html", "%2e%2e%2froutes.py", ""])
async def test_no_other_file_is_served(running: Running, name: str) -> None:
    assert (await running.http.get(f"/assets/{name}")).status_code == 404


async def test_the_page_needs_no_key_and_shows_nothing(start: Start, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.toml")
    keys.add("ann")
    running = await start(settings={"keys_file": str(keys.path), "root_path": "/llm"})
    for prefix in ("", "/llm"):
        page = await running.http.get(f"{prefix}/")
        assert page.status_code == 200
        for file in references(page.text):
            assert (await running.http.get(f"{prefix}{file[1:]}")).status_code == 200
        for path in ("/v1/live", "/v1/policies", "/assets", "/assetsx", "/v1/models"):
            assert (await running.http.get(f"{prefix}{path}")).status_code == 401, path


async def test_the_page_is_served_under_names_of_this_server_only(running: Running) -> None:
    for path in ("/", "/assets/x.js"):
        refused = await running.http.get(path, headers={"Host": "page.example"})
        assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "host_not_allowed")
