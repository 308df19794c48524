"""Traces: the W3C context that a request brings, and spans for an OpenTelemetry collector.

`context` and `settings` import nothing of OpenTelemetry. `spans` does, and is imported only while spans are sent.
"""
