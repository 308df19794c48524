"""TLS of every service: reads certificates again when they are renewed, and makes credentials of them.

It may import `logs`, `service` and `settings` of the runtime, but not `rpc`, which imports this package.
"""
