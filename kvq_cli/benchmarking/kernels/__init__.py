"""Kernels measured on the GPU that is there: right first, then how fast, beside the best that 16 bits can do.

An `Experiment` compares cases that compute the same at one shape: `decode`, `matvec`, `quantize`, `assign`. `run`
checks and times them, `tune` looks for better configurations, `targets` says how fast they should be.
"""
