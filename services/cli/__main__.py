"""Runs `paceline` as `python -m services.cli`."""

import sys

from services.cli.main import main

sys.exit(main())
