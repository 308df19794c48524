"""Measures how much many, large or hostile requests slow down other clients."""
