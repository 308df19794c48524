"""Scheduling policies: a folder for each decision, a file for each policy, its source named on top."""
