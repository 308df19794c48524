"""The OpenAI API: admission, routes, schemas, answers, streams.

May import every other room of the gateway but `grpc`.
"""
