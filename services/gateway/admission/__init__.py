"""Admission: the parse limiter, the credit of the scheduler's queue, the service rate and Retry-After.

May import `errors`.
"""
