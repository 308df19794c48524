"""Stored responses: the records, and where they are kept (SQLite, Redis or Valkey).

May import `errors`.
"""
