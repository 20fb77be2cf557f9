"""Attach a method to a model; prefill and decode attention over compressed caches, in PyTorch or by kernels."""
