"""What a running server does: the live view, and the timeline of a request."""
