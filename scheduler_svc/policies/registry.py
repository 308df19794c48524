"""From names and options to policies. A policy is built in, found by an entry point of the group `paceline.policies`,
or named as "module:Class".
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import TypeAdapter, ValidationError

from scheduler_svc.core.policy import BatchPolicy, CapacityPolicy, OrderPolicy, Policies, PolicyError, PreemptionPolicy
from scheduler_svc.policies.presets import DEFAULT, PRESETS, Choice

GROUP = "paceline.policies"
KINDS: dict[str, type] = {
    "order": OrderPolicy,
    "capacity": CapacityPolicy,
    "batch": BatchPolicy,
    "preemption": PreemptionPolicy,
}


@cache
def names(kind: str) -> dict[str, str]:
    """Every known name of a policy of that kind, with where its class is."""
    found = entry_points(group=GROUP)
    prefix = f"{kind}."
    return {point.name.removeprefix(prefix): point.value for point in found if point.name.startswith(prefix)}


def choose(
    preset: str = "",
    overrides: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    base: Choice | None = None,
) -> Choice:
    """A preset (else `base`, else the default one), with other policies and options on top. Raises PolicyError."""
    if preset and preset not in PRESETS:
        raise PolicyError(f"preset: {preset!r} is none of {', '.join(PRESETS)}")
    chosen = PRESETS[preset] if preset else base or PRESETS[DEFAULT]
    replaced = {kind: name for kind, name in (overrides or {}).items() if name}
    return dataclasses.replace(chosen, **replaced, options={**chosen.options, **(options or {})})


def build(choice: Choice) -> Policies:
    """Raises PolicyError naming the policy or option that is wrong; an option has to be meant for one of the four."""
    left = dict(choice.options)
    policies: dict[str, Any] = {}
    used: set[str] = set()
    for kind in KINDS:
        cls = find(kind, getattr(choice, kind))
        policies[kind] = _make(kind, cls, left, used)
    # An option of a preset may be none of the policy's that was put in one's place.
    known = {name for kind in KINDS for known in names(kind) for name in _parameters(find(kind, known))}
    for name in left:
        if name not in used and name not in known:
            raise PolicyError(f"options: {name!r} is no option of any policy")
    return Policies(**policies)


def find(kind: str, name: str) -> type:
    """The class of a policy. Raises PolicyError."""
    location = names(kind).get(name, name)
    module_name, colon, class_name = location.partition(":")
    if not colon:
        raise PolicyError(f"{kind}: {name!r} is none of {', '.join(sorted(names(kind)))}, and no module:Class")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise PolicyError(f"{kind}: {location} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, KINDS[kind])):
        raise PolicyError(f"{kind}: {location} is no {KINDS[kind].__name__}")
    return cls


def _parameters(cls: type) -> dict[str, Any]:
    signature = inspect.signature(cls, eval_str=True)
    return {name: parameter.annotation for name, parameter in signature.parameters.items()}


def _make(kind: str, cls: type, options: dict[str, Any], used: set[str]) -> object:
    arguments = {}
    for name, annotation in _parameters(cls).items():
        if name in options:
            used.add(name)
            try:
                arguments[name] = TypeAdapter(annotation).validate_python(options[name])
            except ValidationError as error:
                raise PolicyError(f"options.{name}: {error.errors()[0]['msg']}, not {options[name]!r}") from error
    try:
        return cls(**arguments)
    except Exception as error:
        raise PolicyError(f"{kind} {cls.__name__}: {error}") from error
