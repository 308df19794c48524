"""Admission: how many new requests enter, and how many bodies are parsed per event-loop turn.

May import `errors`.
"""
