"""The layers on a CPU: kernels that numba compiles, and matrices that are packed for oneDNN.

May import `models`, `attention`, `kv` and `device`.
"""

import os

# oneDNN and torch each keep the code of up to 1,024 shapes of a product. After prompts of many lengths, this is several
# hundred MiB that the estimate of the worker's memory does not include. With 64 a worker is as fast. (putenv, because
# the C libraries read it, and os.environ stays what the process was given.)
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    if _name not in os.environ:
        os.putenv(_name, "64")
