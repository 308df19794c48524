"""Structured outputs: their forms, and the trial that bounds what they cost.

May import `admission` and `errors`.
"""
