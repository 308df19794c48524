"""How a setting names a store. Apart from the stores, so that reading the settings loads none of them."""

from __future__ import annotations

NONE, SQLITE = "none", "sqlite"
SQLITE_FILE = "sqlite:///"
REDIS = ("redis://", "rediss://", "unix://")


def check_store_url(value: str) -> str:
    """The value, if it names a store. Raises ValueError."""
    if value in (NONE, SQLITE) or value.startswith(REDIS) or value.removeprefix(SQLITE_FILE) not in ("", value):
        return value
    raise ValueError("must be none, sqlite, sqlite:///FILE, redis://, rediss:// or unix://")
