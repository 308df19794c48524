"""`paceline chat`: a conversation with a running server over OpenAI's HTTP API.

`main` reads the flags and runs one question or the interactive loop (`loop`), `answers` streams one answer, `history`
keeps the messages, and `display` writes to the terminal. `services.cli.http.endpoint` finds the server.
"""
