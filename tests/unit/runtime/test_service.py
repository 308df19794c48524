"""A service raises its limit of open files when it starts."""

from __future__ import annotations

import resource
import subprocess
import sys

CODE = """
import resource
from services.runtime.service import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_of_open_files_is_raised_to_65536_or_the_hard_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (200, hard):
        run = [sys.executable, "-c", CODE.format(hard=limit)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
        soft, kept = map(int, done.stdout.split())
        assert kept == limit
        assert soft == (65536 if limit == resource.RLIM_INFINITY else min(65536, limit))
