"""Services as parties of a simulated network with a virtual clock, and faults on its links.

May import `exchanges`, `schedule`, `system` and `toy_worker` of the simulator.
"""
