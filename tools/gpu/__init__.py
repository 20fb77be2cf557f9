"""What the `make gpu-*` commands are made of: tests in parallel, compiled kernels as a pack, results as archives.

Needs the standard library, torch and triton; runs on the machine with the GPU and on one without.
"""
