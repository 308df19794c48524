"""`paceline up`: the four services as processes of this machine.

`main` puts the parts together: the settings, the ports, the plan of the services, their supervisor and the screen. No
other command imports this package.
"""
