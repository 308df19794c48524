"""The gateway: OpenAI HTTP and gRPC for clients, one session with the scheduler.

`server` puts the rooms together. Imports point down: grpc, openai, openapi, http and engine, grammars, then admission,
text and telemetry. A contract in pyproject.toml holds this order.
"""
