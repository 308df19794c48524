"""Reads a tool call in JSON character by character: `{"name": "f", "arguments": {…}}`, or with `parameters`."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto

_SPACE = " \t\r\n"
_ARGUMENTS = frozenset(("arguments", "parameters"))
_CLOSERS = {"{": "}", "[": "]"}
_SCALAR = frozenset("0123456789+-.eEtruefalsn")


class _Phase(Enum):
    OPEN = auto()  # before the object
    KEY = auto()  # before a key
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    STRING = auto()
    NESTED = auto()  # in an object or a list
    SCALAR = auto()
    NEXT = auto()  # behind a value
    DONE = auto()
    FAILED = auto()


class JsonValue:
    """An object or a list, character by character. It knows brackets and strings, and checks nothing else: arguments
    are passed on as the model wrote them."""

    __slots__ = ("_closers", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_string = self._escaped = False

    def take(self, char: str) -> bool | None:
        """Take the next character. True: the value is complete. None: the character cannot stand here."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return False
        if char == '"':
            self._in_string = True
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
        elif char in "}]":
            if char != self._closers.pop():
                return None
            return not self._closers
        elif char == "<":  # of a closing tag: the value is incomplete
            return None
        return False


class JsonCall:
    """One call. `name` is known before any arguments come out, also if the model writes the arguments first."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._phase = _Phase.OPEN
        self._key = ""
        self._raw: list[str] = []  # of the current string
        self._escaped = False
        self._nested = JsonValue()
        self._arguments = ""  # not yet taken
        self._has_arguments = False
        self._steps: dict[_Phase, Callable[[str], _Phase]] = {
            _Phase.OPEN: self._open,
            _Phase.KEY: self._before_key,
            _Phase.IN_KEY: self._in_key,
            _Phase.COLON: self._colon,
            _Phase.VALUE: self._value,
            _Phase.STRING: self._string,
            _Phase.NESTED: self._in_nested,
            _Phase.SCALAR: self._scalar,
            _Phase.NEXT: self._next,
        }

    @property
    def done(self) -> bool:
        """The object is complete."""
        return self._phase is _Phase.DONE

    @property
    def failed(self) -> bool:
        """The text is no call."""
        return self._phase is _Phase.FAILED

    def push(self, text: str) -> str:
        """Read on, up to the end of the call or of its name, and return the rest. A character at which the call fails
        belongs to the rest."""
        had_name = self.name is not None
        for i, char in enumerate(text):
            self._phase = self._steps[self._phase](char)
            if self.done and self.name is None:
                self._phase = _Phase.FAILED
            if self.failed:
                return text[i:]
            if self.done or (self.name is not None and not had_name):
                return text[i + 1 :]
        return ""

    def take_arguments(self) -> str:
        """The arguments since the last call of this method; "" while the name is unknown. A call without arguments has
        an empty object."""
        if self.name is None:
            return ""
        if self.done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        taken, self._arguments = self._arguments, ""
        return taken

    def _open(self, char: str) -> _Phase:
        return _Phase.OPEN if char in _SPACE else _Phase.KEY if char == "{" else _Phase.FAILED

    def _before_key(self, char: str) -> _Phase:
        if char in _SPACE:
            return _Phase.KEY
        self._raw.clear()
        return _Phase.IN_KEY if char == '"' else _Phase.DONE if char == "}" else _Phase.FAILED

    def _in_key(self, char: str) -> _Phase:
        if (text := self._read_string(char)) is None:
            return _Phase.IN_KEY
        self._key = text
        return _Phase.COLON

    def _colon(self, char: str) -> _Phase:
        return _Phase.COLON if char in _SPACE else _Phase.VALUE if char == ":" else _Phase.FAILED

    def _value(self, char: str) -> _Phase:
        if char in _SPACE:
            return _Phase.VALUE
        if self._key == "name" and char != '"':
            return _Phase.FAILED
        if self._is_argument and self._has_arguments:
            self._key = ""  # arguments again: only the first ones count
        self._has_arguments |= self._is_argument
        if char == '"':
            self._raw.clear()
            return _Phase.STRING
        if char in _CLOSERS:
            self._nested = JsonValue()
            return self._in_nested(char)
        return self._scalar(char) if char in _SCALAR else _Phase.FAILED

    def _string(self, char: str) -> _Phase:
        if (text := self._read_string(char)) is None:
            return _Phase.STRING
        if self._key == "name" and self.name is None:
            self.name = text
        elif self._is_argument:  # some models write the object as a text
            self._arguments += text
        return _Phase.NEXT

    def _in_nested(self, char: str) -> _Phase:
        complete = self._nested.take(char)
        if complete is None:
            return _Phase.FAILED
        if self._is_argument:
            self._arguments += char
        return _Phase.NEXT if complete else _Phase.NESTED

    def _scalar(self, char: str) -> _Phase:
        if char not in _SCALAR:
            return self._next(char)
        if self._is_argument:
            self._arguments += char
        return _Phase.SCALAR

    def _next(self, char: str) -> _Phase:
        if char in _SPACE:
            return _Phase.NEXT
        return _Phase.KEY if char == "," else _Phase.DONE if char == "}" else _Phase.FAILED

    @property
    def _is_argument(self) -> bool:
        return self._key in _ARGUMENTS

    def _read_string(self, char: str) -> str | None:
        """The string that this character ends, or None."""
        if char == '"' and not self._escaped:
            try:
                return _without_surrogates(json.loads(f'"{"".join(self._raw)}"', strict=False))
            except ValueError:  # an escape that JSON does not have
                return "".join(self._raw)
        self._escaped = char == "\\" and not self._escaped
        self._raw.append(char)
        return None


def _without_surrogates(text: str) -> str:
    """The text with a replacement character for each unpaired surrogate, which no answer in UTF-8 can contain."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
