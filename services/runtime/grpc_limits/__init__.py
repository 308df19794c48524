"""Limits of a gRPC server: requests that it receives at once, open streams, and connections of each client.

May import `clients` and `logs` of the runtime.
"""
