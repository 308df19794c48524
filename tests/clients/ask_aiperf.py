"""aiperf's profile of the chat API, streamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, run


def profiles() -> None:
    folder = Path(tempfile.mkdtemp())
    options = {
        "--model": MODEL,
        "--url": URL,
        "--endpoint-type": "chat",
        "--tokenizer": os.environ["PACELINE_CHECKPOINT"],
        "--request-count": "5",
        "--concurrency": "1",
        "--synthetic-input-tokens-mean": "16",
        "--output-tokens-mean": "8",
        "--artifact-dir": str(folder),
        "--ui": "none",
    }
    words = [word for pair in options.items() for word in pair]
    command = [str(Path(sys.executable).parent / "aiperf"), "profile", *words, "--streaming"]
    # With this variable aiperf takes the folder of a tokenizer for a name of the hub.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-300:]
    [report] = folder.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == 5, found["request_count"]
    assert not found.get("error_summary"), found["error_summary"]


run(profile=profiles)
