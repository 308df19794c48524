"""The layers on a CPU: kernels that numba compiles, and matrices that are packed for oneDNN.

May import `models`, `attention`, `kv` and `device`.
"""
