"""Which callers may see data of all tenants."""

from __future__ import annotations

from services.gateway.access.caller import Caller
from services.gateway.errors import ApiError


def is_admin(caller: Caller) -> bool:
    """Whether the caller has an admin key, or keys are off."""
    return caller.key is None or caller.key.admin


def check_admin(caller: Caller, why: str) -> None:
    """Raises ApiError 403 for a key without `admin`. `why`: the reason that the caller is told."""
    if not is_admin(caller):
        message = f"the key {caller.owner!r} may not see this without admin = true: {why}"
        raise ApiError(403, message, code="admin_required")
