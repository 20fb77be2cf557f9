"""Benchmarks of kernels on the local GPU: correctness first, then time beside 16-bit baselines.

An `Experiment` compares cases that compute the same result at one shape: `decode`, `matvec`, `quantize`, `assign`.
`run` checks and times them, `tune` searches faster configurations, `performance_targets` compares with the targets,
`lower_bounds` estimates the least time of compiled code.
"""
