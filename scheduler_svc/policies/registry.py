"""Makes policies from names and options. A policy is built in, found by an entry point of the group
`paceline.policies`, or named as "module:Class". Such a name imports a module. It is allowed in the scheduler's own
settings (flag, environment, file) and in scenario files. An RPC may only repeat a name that is in these settings."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import reprlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.policy.order import PolicyError
from scheduler_svc.policies.presets import DEFAULT, PRESETS, PolicySet

GROUP = "paceline.policies"
# Attributes that a policy may declare, and their values.
DECLARED: dict[str, dict[str, tuple[object, ...]]] = {
    "capacity": {"reserves_prompt": (True, False), "preempts_for_waiting": (True, False)},
    "batch": {"shares_in_step": (True, False)},
    "preemption": {"requeue": ("arrival", "front", "back"), "mode": ("recompute", "swap", "auto")},
}
KINDS: dict[str, type] = get_type_hints(Policies)  # order, capacity, batch, preemption, placement


@cache
def names(kind: str) -> dict[str, str]:
    """Every known name of a policy of that kind, and the location of its class. A policy of another package cannot
    replace a built-in one."""
    prefix = f"{kind}."
    found = sorted(entry_points(group=GROUP), key=lambda point: point.value.startswith("scheduler_svc."))
    return {point.name.removeprefix(prefix): point.value for point in found if point.name.startswith(prefix)}


def choose(
    preset: str = "",
    overrides: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    base: PolicySet | None = None,
) -> PolicySet:
    """A preset (else `base`, else the default preset), with other policies and options on top. If a policy of `base` is
    replaced, options of `base` that none of the chosen policies has are dropped. Raises PolicyError."""
    if preset and preset not in PRESETS:
        raise PolicyError(f"preset: {preset!r} is none of {', '.join(PRESETS)}")
    chosen = PRESETS[preset] if preset else base or PRESETS[DEFAULT]
    replaced: dict[str, Any] = {kind: name for kind, name in (overrides or {}).items() if name}
    choice = dataclasses.replace(chosen, **replaced)
    kept = dict(chosen.options)
    if replaced and not preset and base:
        known = {name for kind in KINDS for name in _parameters(kind, find(kind, getattr(choice, kind)))}
        kept = {name: value for name, value in kept.items() if name in known}
    return dataclasses.replace(choice, options={**kept, **(options or {})})


def check_installed(overrides: Mapping[str, str], base: PolicySet) -> None:
    """Raise PolicyError if a name would import a module that the operator has not chosen: one that is neither installed
    nor part of `base`, the scheduler's own configuration."""
    for kind, name in overrides.items():
        if ":" in name and name != getattr(base, kind):
            known = ", ".join(sorted(names(kind)))
            raise PolicyError(
                f"{kind}: {name!r} names a module. Only the scheduler's own configuration (--{kind}, or {kind} in its "
                f"file) may do that. A call may name one of: {known}. (Others need an entry point of {GROUP}.)"
            )


def check_given(choice: PolicySet, options: Mapping[str, Any]) -> None:
    """Raise PolicyError if an option that the operator has set belongs to none of the policies."""
    of = {kind: _parameters(kind, find(kind, getattr(choice, kind))) for kind in KINDS}
    for name in options:
        if not any(name in known for known in of.values()):
            known = ", ".join(f"{kind} {getattr(choice, kind)} ({', '.join(of[kind]) or 'none'})" for kind in KINDS)
            raise PolicyError(f"options.{name}: none of the policies has it; they and their options: {known}")


def build(choice: PolicySet) -> Policies:
    """Make the policies. Raises PolicyError, which names the policy or option that is wrong. An option may belong to
    another policy: to one that was replaced, or to another preset that is tried on the same scenario."""
    policies: dict[str, Any] = {}
    used: set[str] = set()
    for kind in KINDS:
        cls = find(kind, getattr(choice, kind))
        policies[kind] = _make(kind, cls, choice.options)
        used.update(_parameters(kind, cls))
    if unused := [name for name in choice.options if name not in used]:
        known = _options_of_any()
        for name in unused:
            if name in known:
                _checked(name, known[name], choice.options[name])
            else:
                raise PolicyError(f"options.{name}: no policy has such an option; there are {', '.join(sorted(known))}")
    return Policies(**policies)


def _options_of_any() -> dict[str, Any]:
    """Options of all installed policies, with their types. A policy that cannot be imported has none."""
    known: dict[str, Any] = {}
    for kind in KINDS:
        for name in names(kind):
            with contextlib.suppress(PolicyError):
                known.update(_parameters(kind, find(kind, name)))
    return known


def find(kind: str, name: str) -> type:
    """The class of a policy. Raises PolicyError."""
    location = names(kind).get(name, name)
    module_name, colon, class_name = location.partition(":")
    if not colon:
        raise PolicyError(f"{kind}: {name!r} is none of {', '.join(sorted(names(kind)))}, and no module:Class")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script without a `__main__` guard exits
        raise PolicyError(f"{kind}: {location} cannot be imported: {str(error) or type(error).__name__}") from error
    if not (isinstance(cls, type) and issubclass(cls, KINDS[kind])):
        raise PolicyError(f"{kind}: {location} is no {KINDS[kind].__name__}")
    return cls


@cache
def _parameters(kind: str, cls: type) -> dict[str, Any]:
    """The options of a policy: its constructor's arguments, with their types. Raises PolicyError."""
    try:
        parameters = inspect.signature(cls, eval_str=True).parameters.values()
    except Exception as error:  # a type may be imported for type checkers only
        raise PolicyError(f"{kind}: the options of {cls.__name__} have no types that can be read: {error}") from error
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter.annotation for parameter in parameters if parameter.kind in named}


def _make(kind: str, cls: type, options: dict[str, Any]) -> object:
    arguments = {}
    for name, annotation in _parameters(kind, cls).items():
        if name in options:
            arguments[name] = _checked(name, annotation, options[name])
    try:
        policy = cls(**arguments)
    except (KeyboardInterrupt, PolicyError):
        raise
    except BaseException as error:  # as above
        raise PolicyError(f"{kind} {cls.__name__}: {str(error) or type(error).__name__}") from error
    for name, allowed in DECLARED.get(kind, {}).items():
        # The declared value, not that of a property: the core reads it where no code catches an error.
        stated = inspect.getattr_static(policy, name)
        if inspect.ismemberdescriptor(stated):  # of __slots__
            stated = getattr(policy, name, None)
        if stated not in allowed:
            raise PolicyError(f"{kind} {cls.__name__}: {name} is {stated!r}, none of {allowed}")
    return policy


def _checked(name: str, annotation: Any, value: object) -> object:
    """The value of an option, checked against its type: 1 is no boolean; "1" and NaN are no numbers. A tuple becomes a
    list, as in JSON."""
    if annotation is inspect.Parameter.empty:
        return value
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))
        return adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        raise PolicyError(f"options.{name}: {error.errors()[0]['msg']}, not {reprlib.repr(value)}") from error
    except (TypeError, ValueError) as error:  # a date in YAML, for example
        raise PolicyError(f"options.{name}: {reprlib.repr(value)} is no JSON: {error}") from error
    except PydanticUserError:
        raise PolicyError(f"options.{name}: its type, {annotation!r}, cannot be checked") from None
