"""One step of one worker: schedule it, exchange with the cache, emit the plan, read the result.

May import every other package of the core.
"""
