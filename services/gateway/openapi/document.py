"""Builds the document (OpenAPI 3.1) from routes. Each method of a path is an operation of its own, HEAD too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.routing import Route

from services.gateway.openapi.description import Described, description_of

_REF = "#/components/schemas/{model}"
_CONVERTOR = re.compile(r"\{(\w+)(?::\w+)?\}")
_Refs = dict[type[BaseModel], dict[str, Any]]
_Modes = dict[type[BaseModel], JsonSchemaMode]
# pydantic leaves these as they are where a field has a validator of its own.
_KEYWORDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_NO_BODY = frozenset({"HEAD"})


def document(routes: Iterable[Route], *, title: str, version: str, with_keys: bool) -> dict[str, Any]:
    """The document of these routes. `with_keys`: whether calls need an API key. Raises ValueError for a route without a
    description."""
    described = [(route, _description(route)) for route in routes]
    modes: _Modes = {}
    for _, one in described:
        modes[one.error] = "serialization"
        modes |= {model: "serialization" for model in (one.answer, one.event) if model is not None}
        modes |= {model: "validation" for model in (one.body, one.form) if model is not None}
    schemas, shared = models_json_schema([*modes.items()], ref_template=_REF)
    components: dict[str, Any] = {"schemas": _plain(shared.get("$defs", {}))}
    refs = {model: schemas[model, mode] for model, mode in modes.items()}
    found: dict[str, Any] = {}
    for route, one in described:
        operations = found.setdefault(_CONVERTOR.sub(r"{\1}", route.path), {})
        for method in _methods(route):
            operations[method.lower()] = _operation(route, one, method, refs)
    info = {"title": title, "version": version}
    value: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": found, "components": components}
    if with_keys:
        bearer = {"type": "http", "scheme": "bearer"}
        components["securitySchemes"] = {
            "bearer": bearer,
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        value["security"] = [{"bearer": []}, {"header": []}]
    return value


def _description(route: Route) -> Described:
    found = description_of(route.endpoint)
    if found is None:
        raise ValueError(f"the route {route.path} has no description (services/gateway/openapi)")
    return found


def _methods(route: Route) -> Sequence[str]:
    """GET first, HEAD last: the operation id of the first one is the route's name."""
    return sorted(route.methods or (), key=lambda method: ("GET", "POST", "DELETE", "PUT", "HEAD").index(method))


def _operation(route: Route, one: Described, method: str, refs: _Refs) -> dict[str, Any]:
    first = method == _methods(route)[0]
    text = " ".join((inspect.getdoc(route.endpoint) or "").split())
    value: dict[str, Any] = {
        "operationId": route.name if first else f"{route.name}_{method.lower()}",
        "summary": text,
        "responses": _responses(one, method, refs),
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _CONVERTOR.findall(route.path)
    ]
    parameters += [
        {"name": name, "in": "header", "required": False, "description": what, "schema": {"type": "string"}}
        for name, what in one.headers.items()
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "description": what, "schema": {"type": "string"}}
        for name, what in one.query.items()
    ]
    if parameters:
        value["parameters"] = parameters
    bodies = {"application/json": one.body, "multipart/form-data": one.form}
    if content := {kind: {"schema": refs[model]} for kind, model in bodies.items() if model is not None}:
        value["requestBody"] = {"required": True, "content": content}
    return value


def _responses(one: Described, method: str, refs: _Refs) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if one.answer is not None:
        content["application/json"] = {"schema": refs[one.answer]}
    if one.event is not None:
        what = "events with the `data` of this schema; completions and chats end with [DONE]"
        schema = {"type": "string", "description": what, "contentMediaType": "application/json"}
        content["text/event-stream"] = {"schema": schema | {"contentSchema": refs[one.event]}}
    if one.text:
        content[one.text] = {"schema": {"type": "object" if one.text == "application/json" else "string"}}
    responses: dict[str, Any] = {}
    if content or not one.statuses:
        responses["200"] = {"description": "OK", **({"content": content} if content else {})}
    for status, what in one.statuses.items():
        responses[str(status)] = {"description": what}
        if status >= 300 and one.answer is not None:
            responses[str(status)]["content"] = {"application/json": {"schema": refs[one.answer]}}
    # A Host or an Origin that may not call the server is refused wherever a key is asked for.
    refusing = {403} if 401 in one.errors else set()
    for status in sorted({*one.errors} | refusing):
        shape = {"application/json": {"schema": refs[one.error]}}
        responses.setdefault(str(status), {"description": HTTPStatus(status).phrase, "content": shape})
    if method in _NO_BODY:
        responses = {status: {"description": each["description"]} for status, each in responses.items()}
    return responses


def _plain(value: Any) -> Any:
    """The schema with JSON Schema's names of limits, and without the titles that repeat the names of fields."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    kept = {name: entry for name, entry in value.items() if not (name == "title" and isinstance(entry, str))}
    return {_KEYWORDS.get(name, name): _plain(entry) for name, entry in kept.items()}
