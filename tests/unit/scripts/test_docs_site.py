"""Links between pages of docs/ and other files of the repository, in the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import docs_site


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in ("README.md", "docs/a.md", "docs/adr/README.md", "docs/adr/1.md", "core/step.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("# A page\n")
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("page", "link", "in_site"),
    [
        ("docs/a.md", "adr/1.md", "adr/1.md"),
        ("docs/a.md", "adr/", "adr/README.md"),
        ("docs/a.md", "../core/step.py", "core/step.py.md"),
        ("docs/a.md", "../core", "core.md"),
        ("docs/a.md", "../README.md#a-page", "README.md#a-page"),
        ("docs/adr/1.md", "../a.md#x", "../a.md#x"),
        ("docs/adr/1.md", "../../README.md", "../README.md"),
        ("README.md", "docs/a.md", "a.md"),
    ],
)
def test_a_link_leads_to_the_same_file_in_the_site(page: str, link: str, in_site: str) -> None:
    assert docs_site.relink(f"[x]({link})", page) == f"[x]({in_site})"


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("link", ["nothing.md", "../core/nothing.py", "https://example.org/a.md", "#a-page", "/a.md"])
def test_other_links_stay_unchanged_and_mkdocs_checks_them(link: str) -> None:
    assert docs_site.relink(f"[x]({link})", "docs/a.md") == f"[x]({link})"


@pytest.mark.usefixtures("repository")
def test_the_files_that_a_page_links_to_are_found() -> None:
    text = "[x](../core/step.py) ![y](nothing.png) [z](adr/1.md#a) [w](https://example.org/)"
    assert docs_site.linked_paths(text, "docs/a.md") == ["core/step.py", "docs/adr/1.md"]


def test_a_file_is_shown_as_a_listing(repository: Path) -> None:
    (repository / "core/step.py").write_text("x = 1\n")
    assert docs_site.page_text("core/step.py").endswith("# core/step.py\n\n~~~~~~ py\nx = 1\n\n~~~~~~")
    assert docs_site.page_text("docs/a.md") == "# A page\n"
