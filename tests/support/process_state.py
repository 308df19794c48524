"""Prints what a process was given, as JSON, for the tests of the fork server; then ends as its first argument says:
`exit`, `raise`, or `wait` for a signal."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import uuid

import numpy as np


def state() -> dict[str, object]:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)
    return {
        "same": {
            "arguments": sys.argv,
            "folder": os.getcwd(),
            "path": sys.path,
            "module": __name__,
            "spec": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
            "environment": {name: value for name, value in os.environ.items() if name != "PACELINE_PARENT_PID"},
            "files": {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in range(3)},
            # One of the listed files is the listing itself.
            "num_files": len(os.listdir("/proc/self/fd")) - 1,
            "streams": [stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)],
            "handlers": [str(signal.getsignal(number)) for number in signals],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "threads": [threading.current_thread().name, len(os.listdir("/proc/self/task"))],
            "group": os.getpgid(0),
            "session": os.getsid(0),
            "policy": os.sched_getscheduler(0),
            "umask": os.umask(0o022),
        },
        "own": {
            "random": random.random(),
            "numpy": float(np.random.random()),
            "uuid": [str(uuid.uuid1()), str(uuid.uuid4())],
            "pid": os.getpid(),
        },
        "parent": [os.getppid(), os.environ.get("PACELINE_PARENT_PID")],
    }


if __name__ == "__main__":
    print(json.dumps(state()))
    print("on stderr", file=sys.stderr)
    match sys.argv[1]:
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "raise":
            raise ValueError("as planned")
        case "wait":
            sys.stdout.flush()
            signal.pause()
