"""Runs the real scheduler and cache cores in one process: no socket, and a virtual clock."""
