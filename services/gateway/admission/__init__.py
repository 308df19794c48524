"""Admission: how many new requests enter, how many bodies are parsed per event-loop turn, and Retry-After.

May import `errors`.
"""
