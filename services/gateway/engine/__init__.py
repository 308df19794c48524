"""A request from its parameters to its ending: the session with the scheduler, streams, resumption.

May import `grammars`, `admission`, `text`, `telemetry` and `errors`.
"""
