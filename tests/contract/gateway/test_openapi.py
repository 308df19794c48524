"""/openapi.json: requests made from the document, and whether the answers have its shapes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from tests.contract.gateway.conftest import MODEL, Running, Start
from tests.contract.gateway.test_keys import Keys, bearer

CHAT = [{"role": "user", "content": "hello"}]
# Legal request bodies of each path.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": [7, 8], "max_tokens": 3, "logprobs": 1, "n": 2, "stop": "x", "logit_bias": {"8": 0.5}},
        {"prompt": ["a", "b"], "max_tokens": "3", "stream_interval": 2, "cache_retention": [{"priority": 9}]},
    ],
    "/v1/chat/completions": [
        {"messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 1, "temperature": "0.5"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2},
    ],
    "/v1/responses": [{"input": "hello", "max_output_tokens": 3}, {"input": [{"role": "user", "content": "hi"}]}],
    "/v1/messages": [
        {"model": MODEL, "max_tokens": 3, "messages": CHAT, "system": "be brief", "stop_sequences": ["x"]}
    ],
    "/v1/messages/count_tokens": [{"model": MODEL, "messages": CHAT}],
    "/v1/embeddings": [],  # test_embeddings.py asks an embedding model
    "/v1/policies": [{"preset": "paceline"}, {"order": "fcfs", "options": {"watermark": 0.1}}],
    "/tokenize": [{"prompt": "hello"}, {"messages": CHAT, "return_token_strs": True}],
    "/detokenize": [{"tokens": [7, 8, 9]}],
}


# Uploads are multipart. A batch needs an uploaded file, so no fixed body is legal. test_batches.py tests both.
FILES, BATCHES = "/v1/files", "/v1/batches"


async def document(running: Running, **options: Any) -> dict[str, Any]:
    answer = await running.http.get("/openapi.json", **options)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def validator(api: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": api["components"]})


def referenced(api: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return dict(api["components"]["schemas"][schema["$ref"].rpartition("/")[2]])


async def test_every_operation_has_an_id_of_its_own(running: Running) -> None:
    api = await document(running)
    operations = {(path, method): one for path, each in api["paths"].items() for method, one in each.items()}
    ids = [one["operationId"] for one in operations.values()]
    assert len(set(ids)) == len(ids) == len(operations)
    assert operations["/v1/models", "get"]["operationId"] == "models"
    assert operations["/v1/models", "head"]["operationId"] == "models_head"
    assert {"get", "head", "post"} == api["paths"]["/ping"].keys()
    assert all(one["summary"] for one in operations.values())
    for (path, method), one in operations.items():
        served = await running.http.request(method, path.replace("{model_id}", MODEL).replace("{session_id}", "x"))
        assert str(served.status_code) in one["responses"], (path, method)


async def test_request_schemas_have_all_accepted_fields_and_no_others(running: Running) -> None:
    schemas = (await document(running))["components"]["schemas"]
    bodies = {name: schema for name, schema in schemas.items() if name.endswith("Request")}
    assert len(bodies) >= 8
    for name, schema in bodies.items():
        assert schema["additionalProperties"] is False, name
    assert {"store", "metadata", "service_tier", "session_id", "modalities"} <= bodies["ChatRequest"][
        "properties"
    ].keys()
    assert {"temperature", "top_k", "seed", "tenant", "priority"} <= bodies["MessagesRequest"]["properties"].keys()


async def test_legal_bodies_and_their_answers_have_the_shapes_of_the_document(running: Running) -> None:
    api = await document(running)
    with_body = {path for path, each in api["paths"].items() if "requestBody" in each.get("post", {})}
    assert with_body == BODIES.keys() | {FILES, BATCHES}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODIES["/v1/completions"][0]}
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    data = {"purpose": "batch"} | expiry
    made = await running.http.post(FILES, files={"file": ("in.jsonl", json.dumps(line))}, data=data)
    form = api["paths"][FILES]["post"]
    fields = referenced(api, form["requestBody"]["content"]["multipart/form-data"]["schema"])["properties"]
    assert fields.keys() == data.keys() | {"file"}
    validator(api, form["responses"]["200"]["content"]["application/json"]["schema"]).validate(made.json())
    batch = {"input_file_id": made.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    for path, bodies in (BODIES | {BATCHES: [batch, batch | {"metadata": {"a": "b"}}]}).items():
        operation = api["paths"][path]["post"]
        body_schema = operation["requestBody"]["content"]["application/json"]["schema"]
        answers = operation["responses"]["200"]["content"]["application/json"]["schema"]
        for body in bodies:
            validator(api, body_schema).validate(body)
            answer = await running.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            validator(api, answers).validate(answer.json())


async def test_errors_have_the_shape_of_the_document(running: Running) -> None:
    api = await document(running)
    for path in (*BODIES, BATCHES):
        refused = await running.http.post(path, json={"model": "no such model"})
        described = api["paths"][path]["post"]["responses"][str(refused.status_code)]
        validator(api, described["content"]["application/json"]["schema"]).validate(refused.json())


async def test_refusals_before_routing_are_in_the_document(running: Running) -> None:
    api = await document(running)
    for path, each in api["paths"].items():
        for method, operation in each.items():
            foreign = await running.http.request(method, path, headers={"host": "example.com"})
            assert str(foreign.status_code) in operation["responses"], (method, path)
    for path in (*BODIES, FILES, BATCHES):
        if path != "/v1/embeddings":  # refused before the body is read, because the model is no embedding model
            answer = await running.http.post(path, content=b"a=b", headers={"content-type": "text/plain"})
            assert answer.status_code == 415, path
        assert "415" in api["paths"][path]["post"]["responses"], path


async def test_json_without_a_schema_is_an_object(running: Running) -> None:
    api = await document(running)
    for path in ("/openapi.json", "/tokenizer_info"):
        content = api["paths"][path]["get"]["responses"]["200"]["content"]
        assert content == {"application/json": {"schema": {"type": "object"}}}, path


async def test_queries_and_streams_of_responses_are_in_the_document(running: Running) -> None:
    api = (await document(running))["paths"]

    def query(path: str) -> set[str]:
        return {one["name"] for one in api[path]["get"]["parameters"] if one["in"] == "query"}

    assert query("/v1/responses/{response_id}") == {"stream", "starting_after"}
    assert query("/v1/responses/{response_id}/input_items") == {"after", "limit", "order"}
    for path, method, body in (
        ("/v1/responses", "post", {"input": "hello"}),
        ("/v1/responses/{response_id}", "get", None),
        ("/v1/messages", "post", {"model": MODEL, "max_tokens": 3, "messages": CHAT}),
    ):
        assert api[path][method]["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
        if body is not None:
            answer = await running.http.post(path, json={**body, "stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream")


async def test_with_keys_the_document_says_how_to_send_a_key(start: Start, tmp_path: Any) -> None:
    keys = Keys(tmp_path / "keys.toml")
    secret = keys.add("a")
    running = await start(settings={"keys_file": str(keys.path)})
    assert (await running.http.get("/openapi.json")).status_code == 401
    api = await document(running, headers=bearer(secret))
    assert api["components"]["securitySchemes"].keys() == {"bearer", "header"}
    assert "securitySchemes" not in (await document(await start()))["components"]
