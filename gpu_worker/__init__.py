"""The worker: runs the model's forward passes on a CPU or an NVIDIA GPU, as the scheduler's step plans say.

May import `services.runtime`, `demo` (the path of the demo model) and `paceline`. It is the only service that imports
torch.
"""
