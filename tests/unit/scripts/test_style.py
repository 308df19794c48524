"""The project's own lint, on small working trees."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import style


def findings(folder: Path, files: dict[str, str]) -> list[str]:
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return [f"{found.path}:{found.line}: {found.kind}" for found in style.check(folder)]


def test_words_for_people_are_found_once_each(tmp_path: Path) -> None:
    files = {
        "a.py": '"""A worker who waits."""\n\nx = 1  # nobody\n',
        "b.md": "Whose?\n\nA user who asks. <!-- style: person -->\n",
        "c.proto": "// somebody, everybody\n",
        "CHANGELOG.md": "who\n",
        "docs/adr/1.md": "who\n",
        "d.txt": "who\n",
    }
    assert findings(tmp_path, files) == [
        *("a.py:1: people", "a.py:3: people", "b.md:1: people", "c.proto:1: people", "c.proto:1: people")
    ]


def test_parts_of_words_are_no_words(tmp_path: Path) -> None:
    assert not findings(tmp_path, {"a.py": '"""The whole, whosoever1, nobodyelse."""\n'})


def test_words_for_people_are_found_in_names(tmp_path: Path) -> None:
    text = '"""A module."""\n\nthe_key_is_nobodys = 1\nwho_2 = 2\n'
    assert findings(tmp_path, {"a.py": text}) == ["a.py:3: people", "a.py:4: people"]


def test_test_names_need_a_subject(tmp_path: Path) -> None:
    module = (
        '"""Tests."""\n\n\ndef test_it_works(): ...\n\n\nclass TestA:\n    async def test_of_two_one_waits(self): ...\n'
    )
    module += "\n\ndef test_item_of_what(): ...\n\n\ndef its_helper(): ...\n"
    assert findings(tmp_path, {"tests/a.py": module, "a.py": module}) == ["tests/a.py:4: test", "tests/a.py:8: test"]


def test_two_modules_cannot_have_classes_of_one_name(tmp_path: Path) -> None:
    text = '"""A module."""\n\n\nclass {}:\n    class Inner: ...\n'
    files = {"a.py": text.format("A"), "b.py": text.format("A"), "tests/c.py": text.format("A")}
    files |= {"d.py": text.format("_D"), "e.py": text.format("_D")}
    assert findings(tmp_path, files) == ["b.py:4: class"]


def test_modules_need_docstrings_and_folders_are_limited(tmp_path: Path) -> None:
    files = {f"many/m{i:02}.py": '"""."""\n' for i in range(style.MAX_MODULES)}
    assert not findings(tmp_path, files | {"many/__init__.py": '"""."""\n', "protos/x_pb2.py": ""})
    assert findings(tmp_path, {"many/more.py": ""}) == ["many/more.py:1: docstring", "many:1: folder"]


def test_a_budget_allows_a_number_of_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(style, "check", lambda root: [style.Finding("people", "a.py", 3, "`who` is for people")] * 2)
    assert style.main(["--max", "people=2"]) == 0
    assert style.main(["--max", "people=1"]) == 1
    assert style.main([]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    rest = ", ".join(f"{kind} 0 (at most 0)" for kind in ("test", "class", "docstring", "folder"))
    assert last == f"style: people 2 (at most 0), {rest}"
    with pytest.raises(SystemExit):
        style.main(["--max", "other=1"])
