"""/openapi.json: a description of the HTTP API, made from its routes and from the models that parse request bodies.

May import `errors`. The routes say what they take and answer with `described`.
"""
