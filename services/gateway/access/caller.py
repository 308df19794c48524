"""The owner of a request: its API key, and the tenant and priority that the key permits."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1 import inference_pb2
from services.gateway.errors import ApiError
from services.runtime.keys.entries import ApiKey


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a request. `key` None: the server has no keys, so every request may do everything; or the path needs
    no key. `offline`: the owner does not wait for the answer, so the request yields to others."""

    key: ApiKey | None = None
    offline: bool = False

    @property
    def owner(self) -> str:
        """The key's name, "" without a key. Stored answers and idempotency keys belong to it."""
        return self.key.name if self.key is not None else ""

    def permit(self, metadata: inference_pb2.Submission, named_tenant: str | None) -> inference_pb2.Submission:
        """The metadata with `offline` and the tenant that the key allows. `named_tenant`: the tenant that the request
        names itself.

        On a server without keys, OpenAI's `user` stands for a tenant. On a server with keys it names an end user, and
        may differ from the key's tenant. Raises ApiError 403 for another tenant than the key's, and for a priority
        above the key's. In the queue order, a deadline or an SLO that is shorter than the key's `min_slo_s` counts as
        `min_slo_s` after the arrival.
        """
        key = self.key
        if self.offline:
            metadata.offline = True
        if key is None:
            return metadata
        # The key's priority is rounded to 32 bits, as the request's is. Otherwise 0.1 would be above 0.1.
        if metadata.priority > inference_pb2.Submission(priority=key.max_priority).priority:
            message = (
                f"priority: {metadata.priority:g} is above {key.max_priority:g}, the limit of the key {key.name!r} "
                "(max_priority)"
            )
            raise ApiError(403, message, param="priority", code="priority_not_allowed")
        metadata.owner, metadata.min_slo_s = key.name, key.min_slo_s
        if key.any_tenant:
            metadata.tenant = metadata.tenant or key.tenant
            return metadata
        if named_tenant and named_tenant != key.tenant:
            message = f"tenant: the key {key.name!r} is for the tenant {key.tenant!r}, not for {named_tenant[:128]!r}"
            raise ApiError(403, message, param="tenant", code="tenant_not_allowed")
        metadata.tenant = key.tenant
        return metadata


ANYONE = Caller()
