"""Structured outputs: their forms, and the trial process that limits their cost.

May import `errors`.
"""
