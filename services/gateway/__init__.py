"""The gateway: HTTP and gRPC APIs for clients, one session with the scheduler.

`server` puts the rooms together. Imports point down: grpc, then the other APIs (such as anthropic and batches), openai,
fields and openapi, http and engine, parsing, grammars, then access, admission, text and telemetry. A contract in
pyproject.toml lists all rooms and holds this order.
"""
