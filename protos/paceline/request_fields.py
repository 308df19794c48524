"""The plain fields of a request, each declared once: numbers that steer sampling, and metadata.

A field has one name everywhere: in HTTP, in the Python client, and in two messages of paceline.v1. For SAMPLING these
are SamplingOptions and SamplingParams; for METADATA they are GenerateRequest and Submission. The following derive from
the two tables:

- the client's keyword arguments (services/client/types.py);
- HTTP fields, defaults and checks of the gateway (services/gateway/openai/schema.py, engine/sampling.py,
  engine/request.py, text/model_files.py);
- the scheduler's checks and its own Generate (scheduler_svc/core/admission/, scheduler_svc/generate.py);
- the worker's columns (gpu_worker/steps/slots.py);
- the rows in docs/sampling.md.

Fields with rules of their own are not here, and every layer names them: max_tokens and min_tokens (their limits depend
on the prompt), seed, log probabilities (a flag and a number on the wire), lists of tokens and texts (stop, logit_bias,
bad_words, allowed_token_ids), grammars, flags about text, and cache_retention.

This module holds data, and imports only the standard library: the scheduler's core reads it.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

INT32_MAX = 2**31 - 1
MIN_FLOAT32 = 2.0**-149  # the smallest 32-bit float above 0


def _float32(value: float) -> float:
    """The value as the messages hold it: 0.01 becomes a little less."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


@dataclass(frozen=True, slots=True)
class SamplingParam:
    """A number that steers sampling. `low` and `high` are the limits for clients.

    `processor` says where the worker applies it. `scale` and `filter`: in gpu_worker/sampling/filters.py, from a column
    with one value per slot. `penalty`: in gpu_worker/sampling/logits_processors.py, and only for the slots that ask.
    """

    what: str  # for docs/sampling.md
    processor: Literal["scale", "filter", "penalty"]
    default: float = 0.0
    low: float = 0.0
    high: float = 1.0
    above_low: bool = False  # `low` itself is out of range
    zero_is_default: bool = False  # in SamplingParams, where 0 is no valid value
    minus_one_is_zero: bool = False  # a client may write -1 for 0
    from_model: bool = False  # generation_config.json may set another default
    with_beams: float | None = None  # the only value with a beam search; None: the default
    name: str = ""  # set by `_table`, as is `kind`
    kind: type[float] = float  # float or int

    @property
    def beam_value(self) -> float:
        """The only value that a beam search accepts."""
        return self.default if self.with_beams is None else self.with_beams

    def accepts(self, value: float) -> bool:
        """Whether the value is within the limits. NaN is not."""
        return (self.low < value or (self.low == value and not self.above_low)) and value <= self.high

    @property
    def wire_range(self) -> str:
        """The range of the values in SamplingParams, for error messages."""
        return f"{'(' if self.above_low and not self.zero_is_default else '['}{self.low:g}, {self.high:g}]"

    def to_wire(self, value: float) -> float:
        """The value in SamplingParams."""
        return 0 if self.zero_is_default and value == self.default else value

    def from_wire(self, value: float) -> float:
        """The inverse of `to_wire`."""
        return value or self.default if self.zero_is_default else value


@dataclass(frozen=True, slots=True)
class MetadataField:
    """A number, a text or a flag that does not change the tokens. 0, "" and false: not given."""

    max_chars: int = 0  # of a text
    above_zero: bool = False  # HTTP clients leave a number out instead of giving 0
    name: str = ""  # set by `_table`, as is `kind`
    kind: type[float] | type[str] | type[bool] = float  # float, str or bool


class SamplingNumbers(TypedDict, total=False):
    """The declarations of SAMPLING. The worker applies filters in this order."""

    temperature: Annotated[
        float,
        SamplingParam(
            "divides the logits; 0 is greedy, as is anything below 0.00001",
            "scale", default=1.0, high=100.0, from_model=True, with_beams=0.0,
        ),
    ]  # fmt: skip
    min_p: Annotated[
        float,
        SamplingParam(
            "only tokens at least this many times as likely as the likeliest one",
            "filter", from_model=True,
        ),
    ]  # fmt: skip
    top_k: Annotated[
        int,
        SamplingParam(
            "the k likeliest, and all that equal the last of them; 0: all",
            "filter", default=0, low=0, high=INT32_MAX, minus_one_is_zero=True, from_model=True,
        ),
    ]  # fmt: skip
    top_p: Annotated[
        float,
        SamplingParam(
            "the likeliest tokens up to the one that reaches this share, and all that equal it",
            "filter", default=1.0, above_low=True, from_model=True,
        ),
    ]  # fmt: skip
    typical_p: Annotated[
        float,
        SamplingParam(
            "locally typical sampling: the tokens with a surprise nearest to the entropy, up to this share",
            "filter", default=1.0, above_low=True, zero_is_default=True, from_model=True,
        ),
    ]  # fmt: skip
    repetition_penalty: Annotated[
        float,
        SamplingParam(
            "divides the logit of each token of prompt or output, or multiplies it if negative",
            "penalty", default=1.0, low=_float32(0.01), high=100.0, zero_is_default=True, from_model=True,
        ),
    ]  # fmt: skip
    presence_penalty: Annotated[
        float, SamplingParam("subtracted from the logit of each token of the output", "penalty", low=-2.0, high=2.0)
    ]
    frequency_penalty: Annotated[
        float,
        SamplingParam("subtracted once for each time that the token is in the output", "penalty", low=-2.0, high=2.0),
    ]


class MetadataValues(TypedDict, total=False):
    """The declarations of METADATA."""

    priority: Annotated[float, MetadataField()]  # larger is more urgent
    deadline_s: Annotated[float, MetadataField(above_zero=True)]  # from now
    ttft_slo_s: Annotated[float, MetadataField(above_zero=True)]  # a goal for the first token, from now
    tenant: Annotated[str, MetadataField(max_chars=128)]  # budgets and fair order are per tenant
    cache_salt: Annotated[str, MetadataField(max_chars=256)]  # only requests with the same salt share KV
    offline: Annotated[bool, MetadataField()]  # runs on what other requests leave of each step
    disable_speculation: Annotated[bool, MetadataField()]  # propose no draft tokens for it


def _table(declarations: type) -> dict[str, Any]:
    """The declarations by name, each with its name and type."""
    hints = get_type_hints(declarations, include_extras=True)
    return {
        name: dataclasses.replace(hint.__metadata__[0], name=name, kind=hint.__origin__) for name, hint in hints.items()
    }


SAMPLING: dict[str, SamplingParam] = _table(SamplingNumbers)
METADATA: dict[str, MetadataField] = _table(MetadataValues)
FILTER_NAMES = tuple(name for name, param in SAMPLING.items() if param.processor == "filter")
PENALTY_NAMES = tuple(name for name, param in SAMPLING.items() if param.processor == "penalty")


def docs_rows() -> str:
    """The rows of SAMPLING in docs/sampling.md."""
    rows = []
    for param in SAMPLING.values():
        default = f"{param.default:g}, or the model's" if param.from_model else f"{param.default:g}"
        rows.append(f"| `{param.name}` | {default} | {_limits(param)} | {param.what} |")
    return "\n".join(rows)


def _limits(param: SamplingParam) -> str:
    if param.high == INT32_MAX:
        text = f"{param.low:g} or more"
    elif param.above_low:
        text = f"above {param.low:g}, ≤ {param.high:g}"
    else:
        text = f"{param.low:g}..{param.high:g}"
    return f"{text}; -1 is 0" if param.minus_one_is_zero else text
