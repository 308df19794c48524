"""All layers of a step in one call."""
