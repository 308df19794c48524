"""What every service shares: settings, logs, gRPC servers and channels, liveness, leader lookup, model files.

May import no other package of the project but `paceline`: the protocol's messages, and the fields of requests.
"""
