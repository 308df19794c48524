"""What every Python script of a client uses: it runs the checks, and prints one line of JSON for each.

Only the standard library: the scripts run in the environment of their client.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ.get("PACELINE_URL", "")  # http://host:port
MODEL = os.environ.get("PACELINE_MODEL_NAME", "")
API_KEY = os.environ.get("PACELINE_API_KEY", "none")

CITY_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "enum": [1, 2]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def run(**checks: Callable[[], object]) -> None:
    """Run all checks; a check fails by raising. The process ends with 1 if one failed."""
    failed = False
    for name, check in checks.items():
        try:
            check()
            said = {"check": name.replace("_", " "), "ok": True}
        except Exception as error:  # whatever the client raises is the result
            traceback.print_exc()
            failed = True
            message = " ".join(f"{type(error).__name__}: {error}".split())
            said = {"check": name.replace("_", " "), "ok": False, "error": message[:300]}
        print(json.dumps(said), flush=True)
    sys.exit(failed)
