"""The OpenAI API: admission, routes, schemas, answers, streams.

May import the rooms of the gateway that pyproject.toml lists below it.
"""
