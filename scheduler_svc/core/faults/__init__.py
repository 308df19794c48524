"""Requests that were in failed steps are retried separately, until it is known which one is to blame.

May import `lifecycle`, `policy` and what these import.
"""
