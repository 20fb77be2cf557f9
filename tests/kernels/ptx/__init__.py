"""Executes compiled kernels (PTX) for an NVIDIA GPU on a machine without one.

Triton's interpreter executes a kernel's source; it does not cover thread layouts, inline assembly and shared memory.
Here PTX is executed on tensors in ordinary memory. Anything that a device would fault on is an error: addresses outside
of the tensors that were passed, misaligned accesses, shared memory that another warp reads or writes without a barrier.

`driver.activate("sm_90")` makes every launch of the process run like this. Unsupported: atomics, calls with results,
tensor copies.
"""
