"""TLS of every service: reads certificates again when they are renewed, and makes credentials of them.

It may import `services.runtime.logs`, `service` and `settings`. `services.runtime.rpc` and the gateway's HTTP server
import it.
"""
