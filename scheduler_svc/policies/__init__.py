"""Scheduling policies, one small file each, with its source named."""
