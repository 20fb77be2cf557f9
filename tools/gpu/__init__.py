"""Scripts of the `make gpu-*` commands: parallel tests, packs of compiled kernels, archives of results.

Needs the standard library, torch and triton; runs on the machine with the GPU and on one without.
"""
