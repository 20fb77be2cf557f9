"""A fake CUDA device: PyTorch and Triton see an H200, whose tensors are in host memory or have shapes only.

    activate("host")   tensors in host memory; compiled kernels run in the PTX emulator of `tests/kernels/ptx`
    activate("skip")   tensors in host memory; kernels are compiled and bound, but not run
    activate("none")   tensors on PyTorch's meta device: real sizes without memory; kernels are compiled, but not run,
                       and a host read gives zeros, so that a program must not decide by it what to launch

In each mode an operation on tensors of two devices fails as on a GPU. A process and its children activate the fake
device at start if KVQ_FAKE_GPU is set and `tools/fake_gpu/site` is on PYTHONPATH.
"""
