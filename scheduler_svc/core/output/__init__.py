"""What leaves the scheduler: session messages and request timelines.

May import `requests`.
"""
