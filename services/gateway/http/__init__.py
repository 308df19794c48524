"""HTTP/1.1: uvicorn on our sockets, connections and their limits, request bodies. Knows no model and no tokens.

May import `errors`.
"""
