"""Access: the key of a request, the tenant and the priority that it may have, and its quotas.

May import `errors` and `outcome`. The keys themselves are in `services.runtime.keys`.
"""
