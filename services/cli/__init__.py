"""The command line. Imported before grpc, because grpc reads its environment variables only once.

It may import everything, and only tests and benchmarks import it.
"""

import os

# gRPC's own poll loop instead of its EventEngine. The threads of the EventEngine pass every message to each other,
# which takes 1.4 to 1.8 times the thread switches and 1.2 times the CPU (docs/adr/0007).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# No process of ours forks and then calls gRPC in the child. Without this, gRPC logs a warning for each child that
# uvloop starts while gRPC's threads run ("Other threads are currently calling into gRPC, skipping fork() handlers").
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
