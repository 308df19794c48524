"""HTTP/1.1 on sockets: the listener, connections and their limits, bodies. Knows nothing of requests for a model.

May import `errors`.
"""
