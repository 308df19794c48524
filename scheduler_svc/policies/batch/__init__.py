"""What runs in a step."""
