"""Every service and command begins here, before anything imports grpc, which reads its environment but once."""

import os

# gRPC's own poll loop instead of its EventEngine, whose threads hand every message from one to the next: that takes 1.4
# to 1.8 times the switches of threads, and 1.2 times the CPU (docs/adr/0007).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# No process of ours forks and then calls gRPC in the child. Without this, gRPC logs a warning at each child that uvloop
# starts, since its threads run then ("Other threads are currently calling into gRPC, skipping fork() handlers").
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
