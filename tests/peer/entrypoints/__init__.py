"""vLLM's own tests of its entrypoints against Paceline: `python -m tests.peer.entrypoints.run`.

Modules: run (the command), hub (the checkpoints), serve (`vllm serve` as Paceline), plugin (pytest's, in vLLM's
environment), report (the table), expected (why a test that passes on vLLM does not pass here).
"""
