"""Sequences that have blocks, and the blocks of one worker: admission, commits, swaps, pins, restoring.

May import `memory`, `tree` and what these import.
"""
