"""The scheduler as a deterministic state machine: no socket, no clock, no loop. See `scheduler.SchedulerCore`."""
