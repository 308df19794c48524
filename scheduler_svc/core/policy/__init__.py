"""What a policy implements, and what it sees of requests, workers and the step that is scheduled.

May import `requests` and `workers`.
"""
