"""Benchmarks of time and memory: generation, calibration and kernels, beside 16-bit and transformers baselines."""
