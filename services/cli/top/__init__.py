"""`paceline top`: the live view of a running server in the terminal.

`feed` follows the snapshots of GET /v1/live, `lines` and `bars` make text of a snapshot, `screen` fits it into the
terminal, `keys` reads the keyboard, and `main` puts them together.
"""
