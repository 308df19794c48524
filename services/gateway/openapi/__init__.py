"""/openapi.json: a description of the HTTP API, made from its routes and from the models that parse request bodies.

May import `errors`. With `described` a route says what it takes and answers.
"""
