"""A service that can have its event loop stuck, for tests: `python -m tests.support.stuck_service serve scheduler ...`.

It is the real service, but SIGUSR1 makes its event loop sleep for STUCK_S. All its other threads run on: gRPC answers
pings and takes connections, the model computes. The real service has no such signal handler.
"""

from __future__ import annotations

import signal
import sys
import time

from services.cli.main import main

STUCK_S = 7.0

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(STUCK_S))
    sys.exit(main(sys.argv[1:]))
