"""The memory of this machine: what is available, and what its workers have claimed."""
