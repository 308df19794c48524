"""Who is offered a place first."""
