"""The look-up of checkpoints, which gateway and worker share, refuses GGUF before it fetches anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime.model.hub import NoSuchModel, checkpoint_folder


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "gguf-only" / "model-Q4_K_M.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    return file


def test_a_file_a_folder_and_a_repository_of_gguf_are_refused(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.runtime.model.hub._fetch", lambda *_: pytest.fail("the hub was asked"))
    for model in (str(gguf), str(gguf.parent), "owner/Model-7B-GGUF", "/nowhere/model.gguf"):
        with pytest.raises(NoSuchModel, match="is GGUF, which is not supported"):
            checkpoint_folder(model, ["*.json"])


def test_a_checkpoint_with_a_gguf_file_beside_it_is_served(gguf: Path) -> None:
    (gguf.parent / "config.json").write_text("{}")
    assert checkpoint_folder(str(gguf.parent), ["*.json"]) == gguf.parent
