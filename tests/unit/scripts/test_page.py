"""The committed build of the gateway's page is that of its source, and the source passes its own tests."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import page

NODE = shutil.which("node")


def test_the_build_belongs_to_the_source() -> None:
    assert page.check() == 0


@pytest.mark.parametrize("changed", ["src/main.tsx", "static/index.html"])
def test_a_change_without_a_build_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    copy = tmp_path / "page"
    shutil.copytree(page.PAGE, copy, ignore=shutil.ignore_patterns("node_modules", "build"))
    for name, path in {"PAGE": copy, "STATIC": copy / "static", "MANIFEST": copy / "static" / "build.json"}.items():
        monkeypatch.setattr(page, name, path)
    assert page.check() == 0
    with (copy / changed).open("a") as file:
        file.write(" ")
    assert page.check() == 1
    assert ("source" if changed.startswith("src") else "build") in capsys.readouterr().err


def test_versions_are_exact() -> None:
    package = json.loads((page.PAGE / "package.json").read_text())
    versions = [*package["dependencies"].values(), *package["devDependencies"].values()]
    assert all(version[0].isdigit() for version in versions), versions


@pytest.mark.skipif(NODE is None, reason="no node: apt-get install nodejs npm")
@pytest.mark.skipif(not (page.PAGE / "node_modules").is_dir(), reason="no packages: npm ci in services/gateway/page")
def test_the_source_passes_its_own_tests() -> None:
    done = subprocess.run(["npm", "test", "--silent"], cwd=page.PAGE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# pass 0" not in done.stdout
