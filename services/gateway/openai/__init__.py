"""The OpenAI API: routes, schemas, answers, streams.

May import every other room of the gateway but `grpc`.
"""
