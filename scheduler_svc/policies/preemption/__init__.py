"""Which sequence is preempted first."""
