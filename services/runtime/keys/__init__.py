"""API keys: the key file and its hot reload, how a call shows its key, and which admin calls need one.

May import `logs`, `rpc`, `service`, `settings` and `tls` of the runtime. `services.gateway.access` decides what a
key may use in a gateway.
"""
