"""What gateways share: stored responses, files and batches, and the stores that keep them (SQLite, Redis or Valkey).

May import `errors`.
"""
