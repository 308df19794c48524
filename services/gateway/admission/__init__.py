"""How many requests are parsed and submitted at once, and when a refused client should retry.

May import `errors`.
"""
