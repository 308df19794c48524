"""Which waiting request is offered a slot first."""
