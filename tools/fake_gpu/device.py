"""Tensors of the fake device: a PyTorch function mode that tracks the device of every tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
#: Functions that take tensors of two devices on a GPU, too: copies, and indexing with CPU indices.
_CROSS_DEVICE = {"copy_", "__getitem__", "__setitem__", "index_put_", "index_put", "index", "set_", "__set__", "to"}
_CROSS_DEVICE |= {"_has_compatible_shallow_copy_type"}
_DIVISIONS = {"div", "divide", "true_divide", "__truediv__"}
#: Products that take a CPU too long at a model's real size: their result is then zeros.
_PRODUCTS = {"linear", "matmul", "__matmul__", "bmm", "scaled_dot_product_attention"}
_LARGE_PRODUCT = 1 << 30  # multiply-adds
_HOST_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "allclose"}


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on the fake device. The mark is on its storage, which views and parameters share."""
    with torch._C.DisableTorchFunction():
        if tensor.is_meta:
            return FakeDevice.memory.type == "meta"
        return getattr(tensor.untyped_storage(), "on_fake_device", False)


def _mark(tensor: Tensor, device: torch.device) -> None:
    with torch._C.DisableTorchFunction():
        if not tensor.is_meta:
            tensor.untyped_storage().on_fake_device = device.type == "cuda"


class FakeDevice(TorchFunctionMode):
    """memory: the device that holds the fake device's tensors, PyTorch's "cpu" or "meta"; one per process.

    skip_products: whether large products on the fake device are zeros.
    """

    memory = torch.device("cpu")
    skip_products = False

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function is torch.device or name == "_parse_to":  # these only name a device
            return function(*args, **kwargs)
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        if name == "__get__":
            return self._attribute(owner, function, args)
        if name in ("cpu", "numpy"):
            return self._to_host(name, function, args, kwargs)
        if name in _HOST_READS and any(isinstance(x, Tensor) and x.is_meta for x in args[:1]):
            return self._host_read(name, args[0])
        if name == "register_hook":
            return function(args[0], self._in_mode(args[1], _device_of(args[0])))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        before = {x.untyped_storage()._cdata for x in tensors} if self.memory.type == "cpu" else set()
        wanted = CUDA if name == "cuda" else _requested(args, kwargs)
        if name not in _CROSS_DEVICE and wanted is None:
            _check_same_device(function, tensors)
        if self.memory.type == "meta" and name in ("to", "copy_"):
            source = args[0] if name == "to" else args[1]
            if on_device(source) and (wanted == CPU if name == "to" else not on_device(args[0])):
                return _zeros(args, kwargs) if name == "to" else args[0].zero_()
        if name == "cuda":
            function, name, args = torch.Tensor.to, "to", (args[0], CUDA)
        args, kwargs = (
            tree_map(self._real_device, args),
            {key: tree_map(self._real_device, value) for key, value in kwargs.items()},
        )
        generator = kwargs.get("generator")
        if wanted == CUDA and self.memory.type == "meta" and generator is not None:
            kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        if (
            self.skip_products
            and name in _PRODUCTS
            and on_device(args[0])
            and _multiply_adds(name, *args[:2]) > _LARGE_PRODUCT
        ):
            out = _zero_result(function, args, kwargs)
        elif name in _DIVISIONS and len(args) == 2 and not kwargs and isinstance(args[1], (int, float)):
            out = _divide(function, *args)
        else:
            out = function(*args, **kwargs)
        return self._set_device(out, name, args, tensors, before, wanted)

    def _set_device(
        self, out: Any, name: str, args: tuple, tensors: list[Tensor], before: set[int], wanted: torch.device | None
    ) -> Any:
        """Mark the result with the requested device, by default that of the arguments."""
        if self.memory.type == "meta":
            return out
        if name == "to" and isinstance(out, Tensor):
            target = wanted or (_device_of(args[1]) if len(args) > 1 and isinstance(args[1], Tensor) else None)
            if target is None:
                target = _device_of(tensors[0])
            if target != _device_of(tensors[0]) and out.untyped_storage()._cdata in before:
                out = out.clone()
            _mark(out, target)
            return out
        target = wanted or (CUDA if any(on_device(x) for x in tensors) else CPU)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in before:
                _mark(x, target)
        return out

    def _in_mode(self, hook: Callable, device: torch.device) -> Callable:
        """Wrap a hook so that it runs in this mode, which a backward pass disables."""

        def wrapped(gradient: Tensor) -> Any:
            _mark(gradient, device)
            with FakeDevice():
                return hook(gradient)

        return wrapped

    def _real_device(self, x: Any) -> Any:
        """Return the device that holds the tensors for the fake device; anything else unchanged."""
        named = isinstance(x, torch.device) and x.type == "cuda" or isinstance(x, str) and x.partition(":")[0] == "cuda"
        return self.memory if named else x

    def _attribute(self, owner: str, function: Callable, args: tuple) -> Any:
        if owner == "device" and on_device(args[0]):
            return CUDA
        if owner == "is_cuda":
            return on_device(args[0])
        if owner == "is_cpu":
            return not on_device(args[0])
        if owner == "is_meta" and self.memory.type == "meta":
            return False
        out = function(*args)
        if isinstance(out, Tensor) and on_device(args[0]):
            _mark(out, CUDA)
        return out

    def _to_host(self, name: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not on_device(tensor):
            return function(*args, **kwargs)
        if name == "numpy":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first")
        with torch._C.DisableTorchFunction():
            out = torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.clone()
        _mark(out, CPU)
        return out

    def _host_read(self, name: str, tensor: Tensor) -> Any:
        """Return zeros for the values of a meta tensor; comparisons are True."""
        if name in ("equal", "allclose", "__bool__", "is_nonzero"):
            return True
        with torch._C.DisableTorchFunction():
            zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return getattr(zeros, name)()


def _divide(function: Callable, x: Tensor, number: float) -> Tensor:
    """Divide by a host number as CUDA does: multiply by its reciprocal, rounded to float32 (float64 for float64)."""
    if not on_device(x) or not x.is_floating_point():
        return function(x, number)
    wide = np.float64 if x.dtype == torch.float64 else np.float32
    return x * float(wide(1) / wide(number))


def _multiply_adds(name: str, x: Tensor, y: Tensor) -> int:
    """Multiply-adds of a product of `_PRODUCTS`, about."""
    with torch._C.DisableTorchFunction():
        return x.numel() * (y.shape[-2] if name in ("linear", "scaled_dot_product_attention") else y.shape[-1])


def _zero_result(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return zeros of the shape and dtype of the function's result; their gradient to the left operand is zero."""
    with torch._C.DisableTorchFunction():
        meta = tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
        out = function(*meta[0], **meta[1])
        return torch.zeros(out.shape, dtype=out.dtype) + 0 * args[0].flatten()[0]


def _zeros(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the result of `tensor.to("cpu", ...)` for a meta tensor: zeros."""
    dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
    with torch._C.DisableTorchFunction():
        return torch.zeros(args[0].shape, dtype=dtypes[0] if dtypes else args[0].dtype)


def _device_of(tensor: Tensor) -> torch.device:
    return CUDA if on_device(tensor) else CPU


def _requested(args: tuple, kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that a call names, if any."""
    for x in (*args, kwargs.get("device")):
        if isinstance(x, torch.device):
            return torch.device(x.type, 0) if x.type == "cuda" else x
        if isinstance(x, str) and (x == "cpu" or x.startswith("cuda")):
            return torch.device(x)
    return None


def _check_same_device(function: Callable, tensors: list[Tensor]) -> None:
    """Raise CUDA's RuntimeError for tensors of two devices; CPU scalars may go with any device."""
    devices = {_device_of(x) for x in tensors if x.dim() > 0} | {CUDA for x in tensors if on_device(x)}
    if len(devices) > 1:
        shapes = [(tuple(x.shape), str(_device_of(x))) for x in tensors]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({resolve_name(function) or function}: {shapes})"
        )
