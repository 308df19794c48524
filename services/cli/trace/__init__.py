"""`paceline trace`: a file for Perfetto of what all services do for some seconds.

`clocks` estimates how the clocks of two services differ, `records` puts the records of a trace onto one clock,
`chrome` makes trace events of them, and `main` reads the records from the gateway.
"""
