"""The contents of a scenario file (docs/scenarios.md)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.policies.registry import build, choose

VOCAB = 2**31 - 1
# A scenario is small: a larger one would take all memory, or days.
MAX_TOKENS = 10_000_000
MAX_STEPS = 1_000_000
MAX_BLOCKS = 1_000_000
MAX_BLOCK_SIZE = 65_536

TokenId = Annotated[int, Field(ge=0, lt=VOCAB)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Name = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """Unknown keys are errors; true is no number, and neither are "1" and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Prefix(Strict):
    """A prefix that the requests of one family share."""

    family: Name
    len: int = Field(ge=0, le=MAX_TOKENS)


class ScenarioRequest(Strict):
    """One request of a scenario."""

    id: Name
    arrive: int = Field(0, ge=0, le=MAX_STEPS)
    prompt: list[TokenId] | None = None
    prompt_len: Tokens | None = None
    prefix: Prefix | None = None
    max_new_tokens: Tokens
    priority: float = 0.0
    tenant: str = ""
    lora: str | None = None
    offline: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_len or len(self.prompt or ())

    @model_validator(mode="after")
    def _has_a_prompt(self) -> ScenarioRequest:
        if (self.prompt is None) == (self.prompt_len is None):
            raise ValueError("exactly one of prompt and prompt_len is needed")
        if self.prompt is not None and self.prefix is not None:
            raise ValueError("prefix goes with prompt_len, not with prompt")
        if self.prefix and self.prompt_len and self.prefix.len > self.prompt_len:
            raise ValueError(f"prefix.len {self.prefix.len} is more than prompt_len {self.prompt_len}")
        if self.prompt is not None and not self.prompt:
            raise ValueError("prompt: at least one token is needed")
        return self


class PolicyNames(Strict):
    """One policy per decision; "": the default."""

    order: str = ""
    capacity: str = ""
    batch: str = ""
    preemption: str = ""
    placement: str = ""


def _form(preset: object) -> str:
    return "names" if isinstance(preset, dict | PolicyNames) else "name"


Preset = Annotated[Annotated[str, Tag("name")] | Annotated[PolicyNames, Tag("names")], Discriminator(_form)]


class Scenario(Strict):
    """A whole scenario file."""

    block_size: int = Field(ge=1, le=MAX_BLOCK_SIZE)
    num_blocks: int = Field(ge=1, le=MAX_BLOCKS)
    num_host_blocks: int = Field(0, ge=0, le=MAX_BLOCKS)
    max_num_seqs: Tokens
    max_batched_tokens: Tokens
    max_model_len: int = Field(ge=2, le=MAX_TOKENS)
    prefix_caching: bool = True
    preset: Preset = ""
    options: dict[str, Any] = Field(default_factory=dict)
    max_loras: int = Field(0, ge=0)
    requests: list[ScenarioRequest] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_each_request_once(self) -> Scenario:
        seen: set[str] = set()
        for i, request in enumerate(self.requests):
            if request.id in seen:
                raise ValueError(f"requests.{i}.id: {request.id!r} stands more than once")
            seen.add(request.id)
        return self

    @model_validator(mode="after")
    def _is_small(self) -> Scenario:
        prompts = sum(request.num_prompt_tokens for request in self.requests)
        # The scheduler refuses a request that is longer than max_model_len. Such a request generates nothing.
        generated = sum(min(request.max_new_tokens, self.max_model_len) for request in self.requests)
        for name, total in (("prompt_len", prompts), ("max_new_tokens", generated)):
            if total > MAX_TOKENS:
                raise ValueError(f"requests: {name} is {total} in all, {MAX_TOKENS} is the limit")
        return self

    def policies(self) -> Policies:
        """Raises PolicyError."""
        if isinstance(self.preset, str):
            return build(choose(self.preset, options=self.options))
        return build(choose(overrides=self.preset.model_dump(), options=self.options))
