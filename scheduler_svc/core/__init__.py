"""The scheduler as a deterministic state machine: no socket, no clock, no loop. See `scheduler.SchedulerCore`.

Every package may also import `arrays`, `lease`, `rejection` and `types`.
"""
