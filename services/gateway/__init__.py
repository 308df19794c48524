"""The gateway: OpenAI HTTP and gRPC for clients, one session with the scheduler.

`server` puts the rooms together; imports point down: grpc, openai, engine, then text, admission and telemetry.
"""
