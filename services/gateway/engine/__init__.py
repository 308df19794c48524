"""A request from its parameters to its ending: the session with the scheduler, streams, resumption.

May import `parsing`, `grammars`, `admission`, `text`, `telemetry`, `outcome` and `errors`.
"""
