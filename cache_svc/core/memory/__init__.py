"""One memory, of a device or a host: free blocks, cached blocks, eviction order, retention shares of tenants.

May import `tree` and what it imports.
"""
