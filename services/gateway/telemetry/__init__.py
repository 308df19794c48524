"""What the gateway counts, measures and logs of requests.

May import `errors`.
"""
