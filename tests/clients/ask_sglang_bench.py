"""SGLang's bench_serving. Its warm-up fails at any line of a stream that does not begin with `data:`.

Its package imports all of SGLang. Stubs replace the modules that a client does not use, as for SGLang's scheduler
(tests/peer).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from checks import MODEL, URL, run

NUM_PROMPTS = 30
STUBS = Path(__file__).parents[1] / "peer"
START = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
import sglang_stubs
sglang_stubs.ABSENT |= {"datasets"}
sglang_stubs.install()
runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)
"""


def bench(backend: str) -> None:
    options = {
        "--backend": backend,
        "--host": urlsplit(URL).hostname or "",
        "--port": str(urlsplit(URL).port),
        "--model": MODEL,
        "--tokenizer": os.environ["PACELINE_CHECKPOINT"],
        "--dataset-name": "random-ids",
        "--random-input-len": "32",
        "--random-output-len": "8",
        "--num-prompts": str(NUM_PROMPTS),
    }
    words = [word for pair in options.items() for word in pair]
    command = [sys.executable, "-c", START, str(STUBS), *words]
    done = subprocess.run(command, cwd=tempfile.mkdtemp(), capture_output=True, text=True, timeout=280, check=False)
    found = re.search(r"^Successful requests: +(\d+)", done.stdout, re.MULTILINE)
    assert found is not None, (done.stdout + done.stderr)[-300:]
    assert found[1] == str(NUM_PROMPTS), done.stdout[-300:]


run(completions=lambda: bench("sglang-oai"), chat=lambda: bench("sglang-oai-chat"))
