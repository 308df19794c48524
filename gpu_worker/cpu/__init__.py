"""The layers on a CPU: kernels that numba compiles, and matrices that are packed for oneDNN.

May import `models`, `attention`, `kv` and `device`.
"""

import os

# oneDNN and torch keep what they compile for each shape of a product, by default 1,024 each: several hundred MiB after
# prompts of many lengths, which no estimate of a worker's memory has. With 64 a worker is as fast.
# (putenv, because the C libraries read it, and os.environ stays what the process was given.)
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    if _name not in os.environ:
        os.putenv(_name, "64")
