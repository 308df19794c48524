"""One step on the device: slots, input arrays, CUDA graphs, the runner.

May import `attention`, `models`, `kv`, `sampling`, `device` and `errors`.
"""
