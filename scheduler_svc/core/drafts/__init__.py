"""Draft tokens of speculative decoding: which tokens a sequence's own text proposes, and whether that pays.

May import `requests`.
"""
