"""Compute products of 16-bit matrices in float32 on CPUs that have no instructions for 16-bit matrices.

There PyTorch multiplies bfloat16 and float16 matrices 4 to 7 times slower than float32 ones, and float16 gradients up
to 22 times slower (AVX-512 without avx512_fp16). Converting the operands,
multiplying in float32 and rounding the product to 16 bits is what other hardware does in one instruction. Weights stay
in 16 bits; only a product's operands are converted, and released after it. No converted weights are kept: nothing tells
of every change of a weight (`weight.data.add_` changes neither its version nor its place). Kept ones would make steps
of 8 to 32 rows of a 135M model 1.3 to 1.8 times faster in float16, and 0.8 to 1.2 times in bfloat16.

Gradients of float16 models are multiplied in bfloat16 where the CPU has instructions for it, in 0.6 of float32's time:
see `gradient_dtype`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: Rows of a product from which on converting costs less than it saves.
MIN_ROWS = 8
#: Numbers of a product, or of its operand, from which on it is computed a tile of rows at a time.
_MAX_TILE = 1 << 24
#: Rows of a product from which on a weight is converted to oneDNN's layout for this product alone.
_MIN_ROWS_PACKED = 512
#: The mode of the forward pass that a thread computes.
_pass = threading.local()


def upcast_products(model: nn.Module) -> AbstractContextManager:
    """Context in which this thread computes the products of `model`'s dtype in float32, if this CPU needs that."""
    parameter = next(model.parameters(), None)
    if parameter is None or product_dtype(parameter) == parameter.dtype:
        return nullcontext()
    return _Upcast()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which to compute products of `x`'s numbers: float32 on CPUs without instructions for its dtype."""
    return x.dtype if x.device.type != "cpu" or _native(x.dtype) else torch.float32


def gradient_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the operands of products with gradients of `x`'s dtype.

    bfloat16 for float16 on CPUs that multiply bfloat16 matrices alone: a product is off by 0.3 % (root mean square),
    and bfloat16 has float32's range. Else `product_dtype`.
    """
    only_bfloat16 = product_dtype(x) != x.dtype and x.dtype == torch.float16 and _native(torch.bfloat16)
    return torch.bfloat16 if only_bfloat16 else product_dtype(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b, `[..., channels]` by `[outputs, channels]`, in float32 where this CPU needs that; `x`'s dtype
    is returned. For products of decode steps, which are too short to be converted by `upcast_forward_passes`."""
    if product_dtype(x) == x.dtype or x.shape[:-1].numel() < MIN_ROWS:
        return F.linear(x, weight, bias)
    return _upcast(F.linear, (x, weight, bias), {}, x.dtype)


def upcast_forward_passes(model: nn.Module) -> None:
    """Compute `model`'s forward passes inside `upcast_products`, but for those of few tokens."""
    if isinstance(upcast_products(model), nullcontext):
        return

    def enter(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        _pass.mode = nullcontext() if ids is None or ids.numel() < MIN_ROWS else _Upcast()
        _pass.mode.__enter__()

    def leave(_module: nn.Module, _args: tuple, _output: object) -> None:
        _pass.mode.__exit__(None, None, None)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)


def _native(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of this dtype on this CPU about as fast as float32 ones."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    has = torch.cpu.get_capabilities()
    if has.get("architecture") != "x86_64":
        return True
    wanted = ("amx_bf16", "avx512_bf16") if dtype == torch.bfloat16 else ("amx_fp16", "avx512_fp16")
    return any(has.get(name, False) for name in wanted)


class _Upcast(TorchFunctionMode):
    """Replaces products of large 16-bit matrices by `_upcast`."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) > _PRODUCTS[func]:  # operands by keyword: as PyTorch computes them
            left = args[_PRODUCTS[func]]
            if left.dtype in (torch.bfloat16, torch.float16) and left.shape[:-1].numel() >= MIN_ROWS:
                return _upcast(func, args, kwargs, left.dtype)
        return func(*args, **kwargs)


#: Products, and which argument is the left operand.
_PRODUCTS = {F.linear: 0, F.scaled_dot_product_attention: 0, torch.bmm: 0, torch.mm: 0, torch.addmm: 1}
_PRODUCTS |= {torch.matmul: 0, Tensor.matmul: 0, Tensor.__matmul__: 0}


def _upcast(func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    if any(map(is_traceable_wrapper_subclass, (*args, *kwargs.values()))):
        return func(*args, **kwargs)  # a quantized weight computes its products itself
    if func is F.linear:
        x, weight, bias = [*args, *[kwargs[name] for name in ("weight", "bias") if name in kwargs], None][:3]
        if torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in (weight, bias)):
            return func(*args, **kwargs)  # training: weights get gradients
        if torch.is_grad_enabled() and x.requires_grad:
            return _Linear.apply(x, weight, bias)
        return _linear(x, weight, bias)
    wide = {key: _float(value) for key, value in kwargs.items()}
    return func(*map(_float, args), **wide).to(dtype)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, computed in float32."""
    bias = _float(bias)
    if _packs() and x.numel() // x.shape[-1] >= _MIN_ROWS_PACKED:
        packed = _packed(weight.detach())
        return _by_rows(x, len(weight), lambda rows: _packed_linear(rows.contiguous(), packed, bias))
    wide = weight.detach().float()
    return _by_rows(x, len(weight), lambda rows: F.linear(rows, wide, bias))


def _packs() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _packed(weight: Tensor) -> Tensor:
    """A weight in float32, in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.float())


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in float32, of a weight in oneDNN's layout."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """x W^T + b; keeps the 16-bit weight for the backward pass, not its float32 copy. The weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Not as a saved tensor: to save it, checkpointing would compute the last product of a layer again.
        ctx.weight = weight
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        only_bfloat16 = gradient_dtype(gradients[0]) == torch.bfloat16
        weight = ctx.weight.detach().to(torch.bfloat16 if only_bfloat16 else torch.float32)
        return _by_rows(gradients[0], weight.shape[1], lambda rows: rows @ weight, weight.dtype), None, None


def _by_rows(
    x: Tensor, columns: int, product: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32
) -> Tensor:
    """`product` of `x` in `dtype`, rounded to `x`'s; long rows, as those of logits, a tile at a time, so that no whole
    copy of them in `dtype` exists."""
    longest = max(columns, x.shape[-1])
    if x.numel() // x.shape[-1] * longest <= _MAX_TILE:
        return product(x.to(dtype)).to(x.dtype)
    out = x.new_empty(*x.shape[:-1], columns)
    tile = max(1, _MAX_TILE // longest)
    for rows, place in zip(x.flatten(0, -2).split(tile), out.flatten(0, -2).split(tile), strict=True):
        place.copy_(product(rows.to(dtype)))
    return out
