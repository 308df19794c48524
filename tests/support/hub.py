"""A Hugging Face hub on loopback: as much of the HTTP protocol as a download of a model's files needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class FakeHub(ThreadingHTTPServer):
    """Serves `models`: a hub name and the folder with its files. For a name in `gated` it only lists the files.

    As on the real hub a large file (here: weights) is a redirect to another place.
    """

    daemon_threads = True

    def __init__(self, models: Mapping[str, Path], gated: frozenset[str] = frozenset()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.gated = gated
        self.fetched: list[str] = []  # "org/name/file", each GET of a file's content

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables for a process that uses this hub. The hub's client reads them when it is imported."""
        return client_environment(self.url, cache)


def client_environment(endpoint: str, cache: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}


@contextmanager
def fake_hub(models: Mapping[str, Path], gated: frozenset[str] = frozenset()) -> Iterator[FakeHub]:
    with FakeHub(models, gated) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["api", "models", org, name, *rest] if not rest or rest[0] == "revision":
                self._info(f"{org}/{name}")
            case ["api", "models", org, name, "tree", _]:
                self._tree(f"{org}/{name}")
            case [org, name, "resolve", _, *path]:
                self._file(f"{org}/{name}", "/".join(path), linked=False)
            case ["cdn", org, name, *path]:
                self._file(f"{org}/{name}", "/".join(path), linked=True)
            case _:
                self._error(404, "", f"no such page: {self.path}")

    do_HEAD = do_GET

    def _info(self, model: str) -> None:
        if (folder := self._folder(model)) is not None:
            siblings = [{"rfilename": path} for path in _paths(folder)]
            self._json({"id": model, "modelId": model, "sha": _commit(model), "private": False, "siblings": siblings})

    def _tree(self, model: str) -> None:
        if (folder := self._folder(model)) is not None:
            files = [(path, (folder / path).read_bytes()) for path in _paths(folder)]
            self._json([{"type": "file", "path": path, "size": len(data), "oid": _etag(data)} for path, data in files])

    def _file(self, model: str, path: str, linked: bool) -> None:
        if (folder := self._folder(model)) is None:
            return
        if model in self.server.gated:
            self._error(403, "GatedRepo", f"Access to model {model} is restricted")
        elif path not in _paths(folder):
            self._error(404, "EntryNotFound", "Entry not found")
        else:
            data = (folder / path).read_bytes()
            headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": _commit(model)}
            if path.endswith(".safetensors") and not linked:
                large = {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(data))}
                self._answer(302, headers | large | {"Location": f"{self.server.url}/cdn/{model}/{path}"}, b"")
                return
            if self.command == "GET":
                self.server.fetched.append(f"{model}/{path}")
            self._answer(200, headers, data)

    def _folder(self, model: str) -> Path | None:
        if model not in self.server.models:
            self._error(404, "RepoNotFound", "Repository not found")
        return self.server.models.get(model)

    def _json(self, value: object) -> None:
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _error(self, status: int, code: str, message: str) -> None:
        self._answer(status, {"X-Error-Code": code, "X-Error-Message": message}, b"")

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Writes no request log, because it would go into the test's output."""


def _paths(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _commit(model: str) -> str:
    return hashlib.sha1(model.encode()).hexdigest()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
