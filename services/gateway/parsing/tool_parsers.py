"""Find tool calls in a model's text: one parser for each format that models write."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum, auto

from services.gateway.parsing.delta import MessageDelta, earliest, settled
from services.gateway.parsing.json_call import JsonCall, JsonValue

PYTHON_TAG = "<|python_tag|>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class _Phase(Enum):
    TEXT = auto()
    BEFORE = auto()  # behind a marker, before the call
    CALL = auto()
    AFTER = auto()  # behind a call


class ToolParser:
    """The part that all formats share. `known`: the names of the request's tools. `max_calls`: later calls are dropped.

    Text that looks like a call and is none, such as a marker without JSON, stays content. Once the name of
    a call is shown, the call cannot become content again: its arguments end where they stop being JSON.
    """

    markers: tuple[str, ...] = ()

    def __init__(self, known: Collection[str] = (), max_calls: int | None = None) -> None:
        self._known = known
        self._max_calls = max_calls
        self._phase = _Phase.TEXT
        self._held = ""  # text that may belong to a marker
        self._unsure = ""  # what is content if no call follows
        self._call = JsonCall()
        self._is_shown = False  # the current call's name is in the output
        self._index = -1  # of the last call that was shown
        self._steps: dict[_Phase, Callable[[str, MessageDelta], str]] = {
            _Phase.TEXT: self._text,
            _Phase.BEFORE: self._before,
            _Phase.CALL: self._in_call,
            _Phase.AFTER: self._after,
        }

    @property
    def num_calls(self) -> int:
        """Calls that the message has."""
        count = self._index + 1
        return count if self._max_calls is None else min(count, self._max_calls)

    def push(self, text: str, out: MessageDelta) -> None:
        """Read on, and add what this text completes."""
        while text:
            text = self._steps[self._phase](text, out)

    def finish(self, out: MessageDelta) -> None:
        """The text is over: what was kept is content. White space and an incomplete closing tag behind a call are
        dropped."""
        if self._phase is _Phase.AFTER or (self._phase is _Phase.TEXT and self.num_calls and not self._held.strip()):
            return
        out.content += self._unsure + self._held
        self._held = self._unsure = ""

    def _text(self, text: str, out: MessageDelta) -> str:
        text = self._held + text
        at, marker = earliest(text, self.markers)
        if at < 0:
            cut = settled(text, self.markers)
            out.content += text[:cut]
            self._held = text[cut:]
            return ""
        before = text[:at]
        out.content += before.rstrip()
        self._held, self._unsure = "", before[len(before.rstrip()) :] + marker
        self._begin(marker)
        return text[at + len(marker) :]

    def _begin(self, marker: str) -> None:
        """A marker has come."""
        self._phase = _Phase.BEFORE

    def _before(self, text: str, out: MessageDelta) -> str:
        """Read what stands between a marker and the call."""
        raise NotImplementedError

    def _after(self, text: str, out: MessageDelta) -> str:
        """Read what follows a call."""
        raise NotImplementedError

    def _begin_call(self) -> None:
        self._call, self._is_shown, self._phase = JsonCall(), False, _Phase.CALL

    def _in_call(self, text: str, out: MessageDelta) -> str:
        call = self._call
        rest = call.push(text)
        if not self._is_shown:
            self._unsure += text[: len(text) - len(rest)]
            if call.name is not None and self._accepts(call.name):
                self._show(call.name, out)
            elif call.failed or call.name is not None:
                return self._no_call(rest, out)
        if self._is_shown:
            self._add_arguments(call.take_arguments(), out)
        if call.done or call.failed:
            self._phase = _Phase.AFTER
        return rest

    def _accepts(self, name: str) -> bool:
        """Whether a call with this name counts as a call. By default every name does: if the request has no such tool,
        the client refuses the call and tells the model, as with other servers."""
        return True

    def _no_call(self, rest: str, out: MessageDelta) -> str:
        out.content += self._unsure
        self._unsure, self._phase = "", _Phase.TEXT
        return rest

    def _show(self, name: str, out: MessageDelta) -> None:
        self._is_shown, self._unsure = True, ""
        self._index += 1
        if self._max_calls is None or self._index < self._max_calls:
            out.begin_call(self._index, name)

    def _add_arguments(self, text: str, out: MessageDelta) -> None:
        if self._max_calls is None or self._index < self._max_calls:
            out.add_arguments(self._index, text)

    def _to_text(self, text: str) -> str:
        """Go on with text after the calls. White space between the calls and the text is dropped."""
        text = text.lstrip()
        if text:
            self._phase = _Phase.TEXT
        return text


class HermesParser(ToolParser):
    """Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, once for each call."""

    markers = (TOOL_CALL,)

    def _before(self, text: str, out: MessageDelta) -> str:
        self._begin_call()
        return text

    def _after(self, text: str, out: MessageDelta) -> str:
        text = (self._held + text).lstrip()
        self._held = ""
        if text.startswith(TOOL_CALL_END):
            return text[len(TOOL_CALL_END) :]
        if TOOL_CALL_END.startswith(text):
            self._held = text
            return ""
        return self._to_text(text)


class LlamaParser(ToolParser):
    """Llama 3: the whole text is `{"name": "f", "parameters": {…}}`, or several with `;` between them, perhaps behind
    `<|python_tag|>`. A JSON object that names no tool of the request is content."""

    markers = (PYTHON_TAG,)

    def __init__(self, known: Collection[str] = (), max_calls: int | None = None) -> None:
        super().__init__(known, max_calls)
        self._phase = _Phase.BEFORE

    def _before(self, text: str, out: MessageDelta) -> str:
        text = self._held + text
        whole = text.lstrip()
        self._unsure += text[: len(text) - len(whole)]
        self._held = ""
        if whole.startswith(PYTHON_TAG):
            self._unsure += PYTHON_TAG
            return whole[len(PYTHON_TAG) :]
        if PYTHON_TAG.startswith(whole):
            self._held = whole
            return ""
        if whole.startswith("{"):
            self._begin_call()
            return whole
        return self._no_call(whole, out)

    def _accepts(self, name: str) -> bool:
        return name in self._known

    def _after(self, text: str, out: MessageDelta) -> str:
        bare = text.lstrip(" \t\r\n;")
        if not bare:
            return ""
        self._phase = _Phase.BEFORE if bare[0] in "{<" else _Phase.TEXT
        return bare


class MistralParser(ToolParser):
    """Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]`, or `[TOOL_CALLS]f[ARGS]{…}` once for each call (with
    newer tokenizers, where `[ARGS]` may be missing, and `[CALL_ID]` with an id may stand before it)."""

    markers = (TOOL_CALLS,)

    def __init__(self, known: Collection[str] = (), max_calls: int | None = None) -> None:
        super().__init__(known, max_calls)
        self._in_list = False
        self._name = ""
        self._value: JsonValue | None = None  # arguments behind a name

    def _begin(self, marker: str) -> None:
        super()._begin(marker)
        self._in_list, self._name, self._value = False, "", None

    def _before(self, text: str, out: MessageDelta) -> str:
        for i, char in enumerate(text):
            if not self._name and char.isspace():
                self._unsure += char
            elif not self._name and char in "[{":
                self._in_list = char == "["
                self._unsure += "[" * self._in_list
                self._begin_call()
                return text[i + self._in_list :]
            elif char == "{":
                name = self._name.partition(CALL_ID)[0].removesuffix(ARGS).strip()
                if not name:
                    return self._no_call(text[i:], out)
                self._value, self._phase = JsonValue(), _Phase.CALL
                self._show(name, out)
                return text[i:]
            elif char == "\n":
                return self._no_call(text[i:], out)
            else:
                self._name += char
                self._unsure += char
        return ""

    def _in_call(self, text: str, out: MessageDelta) -> str:
        if self._value is None:
            return super()._in_call(text, out)
        for i, char in enumerate(text):
            if (complete := self._value.take(char)) is None:
                self._phase = _Phase.AFTER
                self._add_arguments(text[:i], out)
                return text[i:]
            if complete:
                self._phase = _Phase.AFTER
                self._add_arguments(text[: i + 1], out)
                return text[i + 1 :]
        self._add_arguments(text, out)
        return ""

    def _after(self, text: str, out: MessageDelta) -> str:
        bare = text.lstrip()
        if not bare:
            return ""
        if self._in_list and bare[0] == ",":
            self._begin_call()
            return bare[1:]
        if self._in_list and bare[0] == "]":
            self._in_list = False
            return bare[1:]
        return self._to_text(bare)
