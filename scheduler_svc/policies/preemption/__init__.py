"""Who gives way."""
