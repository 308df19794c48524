"""Metrics, histograms and the request log.

May import `errors` and `outcome`.
"""
