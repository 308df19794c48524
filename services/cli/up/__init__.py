"""`paceline up`: the four services as processes of this machine.

`main` puts the parts together: the settings, the ports, the plan of the services, their supervisor and the screen. Of
the other commands, only `paceline doctor` imports from this package: the settings, the ports, the plan and the like.
"""
