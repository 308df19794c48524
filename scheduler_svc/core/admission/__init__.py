"""Which submissions are accepted, and the waiting queue with its budgets.

May import `policy`, `workers` and `requests`.
"""
