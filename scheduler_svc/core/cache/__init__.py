"""The exchange with the cache service, and swaps to host memory.

May import `requests` and `workers`.
"""
