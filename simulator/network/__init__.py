"""Services as parties of a simulated network with a virtual clock, and faults on its links.

May import the simulator's workers and schedules.
"""
