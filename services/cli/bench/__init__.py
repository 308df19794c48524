"""`paceline bench`: a load generator for OpenAI-compatible servers.

`load` says what is sent and when, `stats` what was measured, `report` shows it: they know no socket, event loop or
clock. The modules of this folder talk to the server and the terminal. The same seed makes the same load.
"""
