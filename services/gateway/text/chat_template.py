"""Chat templates as transformers renders them: jinja2 in an immutable sandbox with the same extensions and helpers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.errors import invalid
from services.gateway.text.chat_values import NO_EXTRAS, ChatExtras
from services.gateway.text.model_files import read_json_object, read_text

# Names that a request may not set.
_RESERVED = frozenset(
    {"self", "messages", "add_generation_prompt", "tools", "documents", "chat_template", "continue_final_message"}
)
# Of a template that a request brings.
_MAX_TEMPLATE_CHARS = 2**16


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text for training. Here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares tags this way

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(fmt: str) -> str:
    return datetime.now().astimezone().strftime(fmt)


class ChatTemplate:
    """A compiled template. `tokens`: the special tokens it may use, as `bos_token` and `eos_token`. `tool_use`: the
    source of another template for chats with tools, which some checkpoints have."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, tool_use: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._for_tools = self._template if tool_use is None else environment.from_string(tool_use)
        # Of the template for chats with tools.
        self.source = source if tool_use is None else tool_use
        self._tokens = dict(tokens or {})

    @classmethod
    def from_folder(cls, folder: Path, override: str | None = None) -> ChatTemplate | None:
        """The checkpoint's template, or `override` (a template or its path). None if there is no template.

        Raises OSError or ValueError if a file cannot be read, and ValueError if the template does not compile.
        """
        config_path = folder / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.is_file() else {}
        source = _find_source(folder, config, override)
        if source is None:
            return None
        tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        tool_use = None if override else _find_tool_use(folder, config)
        try:
            return cls(source, tokens, tool_use)
        except jinja2.TemplateError as error:
            raise ValueError(f"{folder}: the chat template does not compile: {error}") from error

    def replaced_by(self, source: str) -> ChatTemplate:
        """A template from a request, with this one's special tokens. Raises ApiError 400."""
        return _from_request(source, tuple(self._tokens.items()))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        extras: ChatExtras = NO_EXTRAS,
    ) -> str:
        """The chat as text. Raises ApiError 400 if the template refuses it, or if `variables` sets a reserved name."""
        taken = _RESERVED.union(self._tokens).intersection(variables)
        if taken:
            raise invalid("chat_template_kwargs", f"chat_template_kwargs must not set {', '.join(sorted(taken))}")
        template = self._for_tools if extras.tools else self._template
        try:
            return template.render(
                **self._tokens,
                **variables,
                messages=[dict(message) for message in messages],
                tools=extras.tools or None,
                documents=extras.documents or None,
                add_generation_prompt=add_generation_prompt,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise invalid("messages", f"the model's chat template refuses these messages: {error}") from error


@lru_cache(maxsize=16)
def _from_request(source: str, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    name = "chat_template"
    if len(source) > _MAX_TEMPLATE_CHARS:
        message = f"{name} has {len(source)} characters; at most {_MAX_TEMPLATE_CHARS} are possible"
        raise invalid(name, message)
    try:
        return ChatTemplate(source, dict(tokens))
    except (jinja2.TemplateError, RecursionError) as error:
        raise invalid(name, f"{name} does not compile: {error}") from error


def read_tokenizer_info(folder: Path, override: str | None = None) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template that is in use. Raises OSError or ValueError."""
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.is_file() else {}
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    source = _find_source(folder, config, override)
    return info if source is None else {**info, "chat_template": source}


def _find_source(folder: Path, config: Mapping[str, Any], override: str | None) -> str | None:
    if override:
        if "{" in override:
            return override
        return read_text(Path(override))
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    source = config.get("chat_template")
    if isinstance(source, list):
        # Several templates, by name.
        source = next((entry["template"] for entry in source if _is_default(entry)), None)
    if source is not None and not isinstance(source, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named ones"
        )
    return source


def _is_default(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("name") == "default" and "template" in entry


def _find_tool_use(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template that transformers takes for chats with tools, instead of the default one."""
    path = folder / "additional_chat_templates" / "tool_use.jinja"
    if path.is_file():
        return read_text(path)
    sources = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file() or not isinstance(sources, list):
        return None
    return next((e["template"] for e in sources if isinstance(e, dict) and e.get("name") == "tool_use"), None)
