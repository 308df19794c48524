"""What the scheduler knows of one worker: slots, block growth, steps in flight, step times.

May import `requests` and `drafts`.
"""
