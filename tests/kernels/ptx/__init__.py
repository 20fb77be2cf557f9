"""Runs what Triton compiles for an NVIDIA GPU where there is none: PTX, read and executed a block of threads at a time.

Triton's interpreter executes a kernel's source. It cannot show what becomes of it: which thread holds what, assembly
within it, what goes through shared memory and when. Here the compiler's last text but one is executed, on tensors that
lie in ordinary memory. What a device would not forgive is an error: an address beyond the tensors that were passed, one
that is not a multiple of its access, shared memory that another warp reads or writes without a barrier between.

`driver.activate("sm_90")` makes every launch of the process run so. Not known: atomics, calls, tensor copies.
"""
