"""A simulated GPU that runs its operations late, on a CPU. The worker's code for GPUs runs on it unchanged.

`simulate()` (runtime.py) replaces torch's interface to CUDA. Then tensors with `device="cuda"` are LateTensors
(tensors.py). An operation on them enters the queue of a stream (device.py). It runs only when the host waits for it, or
at a random time. Until then its result is poison: NaN, or a number that is no valid index. A captured graph (graphs.py)
is the list of these operations with the memory and the scalars of the capture. FlashInfer's kernels (kernels.py) are
reference kernels that read their plan from device memory when they run.

A real GPU may do everything that this device does; so a test that fails here shows a mistake. Imports point down:
worker; runtime, kernels, planner; graphs, tensors; device.
"""
