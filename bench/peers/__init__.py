"""The systems that ours is measured beside, each in an environment of its own."""
