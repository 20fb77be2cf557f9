"""A CUDA device that is not there: PyTorch and Triton see an H200, whose memory is the host's, or nothing at all.

`activate("host")` keeps the device's tensors in ordinary memory, with real numbers, and runs Triton's kernels in the
emulator of `tests/kernels/ptx`, as they are compiled; `activate("skip")` compiles and binds kernels, but does not run
them. `activate("none")` keeps shapes only (PyTorch's meta device): programs run at real sizes in no memory, kernels are
not run, and reading a tensor back gives zeros, on which a program must not decide what to launch. In each of them an
operation on tensors of two devices fails as it does with a GPU.

A process activates it at start where KVQ_FAKE_GPU is set and `tools/fake_gpu/site` is on PYTHONPATH, its children too.
"""
