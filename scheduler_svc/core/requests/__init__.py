"""One request and its sequences: its tokens, phases, beams.

May import `arrays` and `rejection`.
"""
