"""Hooks of MkDocs: links from docs/ to the rest of the repository work in the site as they do on a git forge.

Pages link to files with relative paths, as in `../scheduler_svc/core/policy/step.py`. The site has a page for each
file outside docs/ to which a page links: a Markdown file as it is, another file as a listing, a folder as the listings
of its files. The site needs no address of a repository. MkDocs then checks all links, headings too: a link that leads
to nothing fails a strict build.

The README is the site's first page. mkdocs.yml names this module under `hooks`.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
FIRST_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# scripts/docs.sh fetches it. Material loads mermaid from a CDN only if no script of the site has defined it.
MERMAID = Path(".venv/mermaid/mermaid.min.js")
MERMAID_URI = "assets/javascripts/mermaid.min.js"

_LINK = re.compile(r"\]\((?P<path>[^()\s:#]+)(?P<anchor>#[^()\s]*)?\)")


def linked_paths(text: str, page: str) -> list[str]:
    """The files and folders of the repository to which a Markdown page links. `page` is its path."""
    paths = (_repository_path(found["path"], page) for found in _LINK.finditer(text))
    return [path for path in paths if (ROOT / path).exists()]


def _repository_path(link: str, page: str) -> str:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    readme = posixpath.join(path, "README.md")
    return readme if (ROOT / readme).is_file() else path


def site_uri(path: str) -> str:
    """The path in the site of a file or folder of the repository. MkDocs makes a page only of a name that ends with
    .md."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return path if path.endswith(".md") else f"{path}.md"


def page_text(path: str) -> str:
    """The page of a Markdown file, of another file, or of a folder with the files that git tracks there."""
    if path.endswith(".md"):
        return (ROOT / path).read_text("utf-8")
    names = [path]
    if (ROOT / path).is_dir():
        names = subprocess.check_output(["git", "ls-files", "-z", path], cwd=ROOT, text=True).rstrip("\0").split("\0")
    parts = ["---\nsearch:\n  exclude: true\n---", f"# {path}"]
    for name in names:
        heading = [f"## {name}"] if name != path else []
        text = (ROOT / name).read_text("utf-8")
        parts += [*heading, f"~~~~~~ {Path(name).suffix.removeprefix('.') or 'text'}\n{text}\n~~~~~~"]
    return "\n\n".join(parts)


def relink(text: str, page: str) -> str:
    """The Markdown with links between pages of the site instead of links between files of the repository."""

    def replace(found: re.Match[str]) -> str:
        path = _repository_path(found["path"], page)
        if not (ROOT / path).exists():
            return found[0]  # MkDocs reports it
        target = posixpath.relpath(site_uri(path), posixpath.dirname(site_uri(page)) or ".")
        return f"]({target}{found['anchor'] or ''})"

    return _LINK.sub(replace, text)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let pages load mermaid from the site, if the machine that builds it has the script."""
    if (ROOT / MERMAID).is_file():
        config.extra_javascript.append(MERMAID_URI)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README and its neighbours, and every file outside docs/ to which a page links."""
    if (ROOT / MERMAID).is_file():
        files.append(File.generated(config, MERMAID_URI, abs_src_path=os.fspath(ROOT / MERMAID)))
    paths = [*FIRST_PAGES, *(DOCS + file.src_uri for file in files.documentation_pages())]
    for path in paths:  # grows on the way
        if path.endswith(".md"):
            paths += dict.fromkeys(linked_paths((ROOT / path).read_text("utf-8"), path)).keys() - set(paths)
        if not path.startswith(DOCS):
            files.append(File.generated(config, site_uri(path), content=page_text(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    uri = page.file.src_uri
    path = uri if page.file.generated_by else DOCS + uri
    return relink(markdown, path) if (ROOT / path).is_file() else markdown
