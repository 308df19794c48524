"""Random messages: any value in any field of any message, and bytes that are almost a message."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_UINT64, _INT64 = 2**64 - 1, 2**63 - 1
_NUMBERS = [0, 1, 2, 3, 7, 16, 100, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, _INT64, _UINT64, -1, -(2**31), -_INT64]
_FLOATS = [0.0, 0.5, 1.0, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan]
_TEXTS = ["", "x", "\0", "ü\U0001f600", "a" * 10_000, "../../etc/passwd", "{}", "[" * 5000, "fcfs", "%s%n"]
_MAX_DEPTH = 5
_BITS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SFIXED32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), _INT64),
    FieldDescriptor.TYPE_SINT64: (-(2**63), _INT64),
    FieldDescriptor.TYPE_SFIXED64: (-(2**63), _INT64),
    FieldDescriptor.TYPE_UINT64: (0, _UINT64),
    FieldDescriptor.TYPE_FIXED64: (0, _UINT64),
}


def random_message(rng: Random, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message of this type with a random subset of its fields."""
    message = GetMessageClass(descriptor)()
    share = rng.choice([0.1, 0.5, 0.9])
    for field in descriptor.fields:
        if rng.random() < share:
            _fill(rng, message, field, depth)
    return message


def _fill(rng: Random, message: Message, field: Any, depth: int) -> None:
    of_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if of_message and depth == _MAX_DEPTH:
        return
    count = rng.choice([1, 1, 2, 5]) if field.is_repeated else 1
    held = getattr(message, field.name)
    if of_message and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        for _ in range(count):
            name = _value(rng, key)
            if value.type == FieldDescriptor.TYPE_MESSAGE:
                held[name].CopyFrom(random_message(rng, value.message_type, depth + 1))
            else:
                held[name] = _value(rng, value)
    elif of_message:
        parts = [random_message(rng, field.message_type, depth + 1) for _ in range(count)]
        held.extend(parts) if field.is_repeated else held.CopyFrom(parts[0])
    elif field.is_repeated:
        held.extend(_value(rng, field) for _ in range(count))
    else:
        setattr(message, field.name, _value(rng, field))


def _value(rng: Random, field: Any) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(_TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return rng.choice([rng.randbytes(rng.choice([0, 1, 3, 4, 8, 40])), bytes(4 * rng.randrange(40))])
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_ENUM:
            return rng.choice([*field.enum_type.values_by_number, 99])
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return rng.choice(_FLOATS)
        case kind:
            low, high = _BITS[kind]
            return min(max(rng.choice(_NUMBERS), low), high)


def mangled(rng: Random, data: bytes) -> bytes:
    """The bytes with a random change; a fifth of the calls change nothing."""
    changed = bytearray(data)
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    match rng.randrange(10):
        case 0 | 1 | 2 | 3 if data:
            for _ in range(rng.choice([1, 1, 1, 2, 8, 40])):
                changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 4:
            del changed[at:]
        case 5:
            changed[at:at] = changed[at:end]
        case 6:
            changed[at:end] = rng.randbytes(rng.choice([0, 1, 2, 10]))
        case 7:
            changed[:] = rng.randbytes(rng.choice([1, 4, 30, 1000]))
    return bytes(changed)
