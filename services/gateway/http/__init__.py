"""HTTP/1.1 on sockets: the listener, connections and their limits, request bodies. Knows no model and no tokens.

May import `errors`.
"""
