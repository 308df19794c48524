"""Build hooks of the wheel `paceline-client`: its files, its version and its requirements.

The wheel has no `paceline/__init__.py`. Its package `paceline/client` also contains the messages that the client sends.
So it shares no file with the distribution `paceline`, and pip can install, upgrade and remove each without the other.
"""

from __future__ import annotations

import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parent.parent.parent
CLIENT = "paceline/client"
# The protocol's modules that the client imports.
PROTOCOL = ("__init__.py", "common_pb2.py", "common_pb2.pyi", "inference_pb2.py", "inference_pb2.pyi",
            "inference_pb2_grpc.py", "inference_pb2_grpc.pyi")  # fmt: skip
REQUIRED = ("grpcio", "protobuf")

# Names of modules, and their names in the wheel. The protocol's own names stay, as in
# `/paceline.v1.InferenceService/Generate`.
_MOVED = (
    (re.compile(r"\bservices\.client\b"), "paceline.client"),
    (re.compile(r"\bpaceline\.request_fields\b"), "paceline.client.request_fields"),
    (re.compile(r"\bpaceline\.v1(?=\.\w+_pb2|\s+import\b)"), "paceline.client.v1"),
)


def client_files() -> dict[str, str]:
    """The text of each module by its path in the wheel."""
    sources = {f"{CLIENT}/{path.name}": path for path in sorted((ROOT / "services/client").glob("*.py"))}
    sources[f"{CLIENT}/request_fields.py"] = ROOT / "protos/paceline/request_fields.py"
    sources |= {f"{CLIENT}/v1/{name}": ROOT / "protos/paceline/v1" / name for name in PROTOCOL}
    files = {f"{CLIENT}/py.typed": ""}
    for target, source in sources.items():
        text = source.read_text("utf-8")
        for name, moved in _MOVED:
            text = name.sub(moved, text)
        files[target] = text
    return files


class ClientFiles(BuildHookInterface[Any]):
    """Puts the client's modules, renamed to `paceline.client`, into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the modules to a temporary folder that lives until `finalize`."""
        if self.target_name != "wheel":
            raise ValueError("paceline-client is built as a wheel only, from the whole repository")
        self._folder = tempfile.TemporaryDirectory()
        for target, text in client_files().items():
            path = Path(self._folder.name, target)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            build_data["force_include"][str(path)] = target
        build_data["force_include"][str(ROOT / "LICENSE")] = f"{CLIENT}/LICENSE"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        self._folder.cleanup()


class ServersMetadata(MetadataHookInterface):
    """Takes the version and the client's requirements from the server's pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill the fields that pyproject.toml calls dynamic."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        metadata["version"] = project["version"]
        metadata["requires-python"] = project["requires-python"]
        by_name = {re.split(r"[<>=!~;\[ ]", line)[0]: line for line in project["dependencies"]}
        metadata["dependencies"] = [by_name[name] for name in REQUIRED]
