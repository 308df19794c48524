"""Settings of the services that know API keys: gateway, scheduler and cache."""

from __future__ import annotations

import os

from pydantic import Field

from services.runtime.keys.source import ADMIN_KEYS_ENV, FILE_ENV, KEYS_ENV
from services.runtime.settings import ServiceSettings


class KeySettings(ServiceSettings):
    """Where the keys are, and what is open without them. PACELINE_API_KEYS and PACELINE_ADMIN_KEYS have no flags: other
    users of a machine can read the flags of a process."""

    keys_file: str | None = Field(
        default_factory=lambda: os.environ.get(FILE_ENV) or None,
        description=f"TOML file of API keys, read again when it changes (default: {FILE_ENV}); keys may also be in "
        f"{KEYS_ENV} and {ADMIN_KEYS_ENV}, with commas",
    )
    insecure: bool = Field(
        False,
        description="without API keys, serve other machines, too (gateway: the API; scheduler and cache: admin calls)",
    )
