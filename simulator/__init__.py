"""Runs the real scheduler and cache cores in one process: no socket, a clock that is turned by hand."""
