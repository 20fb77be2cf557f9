"""Compute products of 16-bit matrices in float32 on CPUs that have no instructions for 16-bit matrices.

There PyTorch multiplies bfloat16 and float16 matrices 4 to 7 times slower than float32 ones, and float16 gradients up
to 22 times slower (AVX-512 without avx512_fp16). Converting the operands,
multiplying in float32 and rounding the product to 16 bits is what other hardware does in one instruction. Weights stay
in 16 bits; only a product's operands are converted, and released after it. Of models whose float32 weights take at most
`MAX_KEPT_BYTES`, the converted weights are kept: converting all of them takes as long as 3 decode steps of 8 rows.
They are kept in oneDNN's blocked layout, in which products of 3 to 16 rows take half as long as in PyTorch's (MKL),
those of 1,024 rows a tenth less.

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
from torch.utils.weak import WeakTensorKeyDictionary

#: Rows of a product from which on converting costs less than it saves.
MIN_ROWS = 8
#: The same where the converted weights are kept.
MIN_ROWS_KEPT = 4
#: Tokens of a pass from which on all products are converted, by a mode that costs every operation some microseconds: a
#: third of a decode step of 8 rows. Of shorter passes of small models, the linear layers alone are converted.
MIN_TOKENS_MODE = 32
#: Bytes of a model's weights in float32 up to which they are kept.
MAX_KEPT_BYTES = 1 << 30
#: Numbers of a product, or of its operand, from which on it is computed a tile of rows at a time.
_MAX_TILE = 1 << 24
#: Rows of a product from which on a weight is converted to oneDNN's layout for this product alone.
_MIN_ROWS_PACKED = 512
#: Numbers of a weight that tell whether it was changed.
_SAMPLED = 64
#: Of the forward pass that a thread computes: its mode, and whether linear layers convert their products.
_pass = threading.local()
#: Weight -> its version, place and sampled numbers when it was converted, and its copies by what converted it.
_kept = WeakTensorKeyDictionary()


def upcast_products(model: nn.Module, keep: bool = True) -> AbstractContextManager:
    """Context in which this thread computes the products of `model`'s dtype in float32, if this CPU needs that.

    keep: keep the converted weights of a small model; over many tokens at a time, converting them again costs little.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or product_dtype(parameter) == parameter.dtype:
        return nullcontext()
    return _Upcast(keep and _is_small(model))


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
    return _upcast(F.linear, (x, weight, bias), {}, x.dtype, keep=False)


def upcast_forward_passes(model: nn.Module) -> None:
    """Convert products of `model`'s forward passes: all inside `upcast_products`, or those of linear layers, or none,
    whatever takes least time for the number of tokens."""
    if isinstance(upcast_products(model), nullcontext):
        return
    small = _is_small(model)

    def enter(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        tokens = 0 if ids is None else ids.numel()
        _pass.linear = small and MIN_ROWS_KEPT <= tokens < MIN_TOKENS_MODE
        _pass.mode = _Upcast(small) if tokens >= (MIN_TOKENS_MODE if small else MIN_ROWS) else nullcontext()
        _pass.mode.__enter__()

    def leave(_module: nn.Module, _args: tuple, _output: object) -> None:
        _pass.linear = False
        _pass.mode.__exit__(None, None, None)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)
    for module in model.modules() if small else ():
        if type(module) is nn.Linear:
            module.__class__ = _Linear16


class _Linear16(nn.Linear):
    """A linear layer of 16-bit weights; its products are converted where `upcast_forward_passes` says so."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(_pass, "linear", False) and self.weight.dtype == x.dtype and not torch.is_grad_enabled():
            return _upcast(F.linear, (x, self.weight, self.bias), {}, x.dtype, keep=True)
        return super().forward(x)


def _native(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of this dtype on this CPU about as fast as float32 ones."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    has = torch.cpu.get_capabilities()
    if has.get("architecture") != "x86_64":
        return True
    wanted = ("amx_bf16", "avx512_bf16") if dtype == torch.bfloat16 else ("amx_fp16", "avx512_fp16")
    return any(has.get(name, False) for name in wanted)


def _is_small(model: nn.Module) -> bool:
    return 4 * sum(parameter.numel() for parameter in model.parameters()) <= MAX_KEPT_BYTES


class _Upcast(TorchFunctionMode):
    """Replaces products of large 16-bit matrices by `_upcast`. keep: keep converted weights."""

    def __init__(self, keep: bool = False) -> None:
        super().__init__()
        self._keep = keep

    def __torch_function__(
        self, func: Callable, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) > _PRODUCTS[func]:  # operands by keyword: as PyTorch computes them
            left = args[_PRODUCTS[func]]
            if left.dtype in (torch.bfloat16, torch.float16) and left.shape[:-1].numel() >= MIN_ROWS:
                return _upcast(func, args, kwargs, left.dtype, self._keep)
        return func(*args, **kwargs)


#: Products, and which argument is the left operand.
_PRODUCTS = {F.linear: 0, F.scaled_dot_product_attention: 0, torch.bmm: 0, torch.mm: 0, torch.addmm: 1}
_PRODUCTS |= {torch.matmul: 0, Tensor.matmul: 0, Tensor.__matmul__: 0}


def _upcast(func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, keep: bool) -> Any:
    if func is F.linear:
        x, weight, bias = [*args, *[kwargs[name] for name in ("weight", "bias") if name in kwargs], None][:3]
        if torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in (weight, bias)):
            return func(*args, **kwargs)  # training: weights get gradients
        if torch.is_grad_enabled() and x.requires_grad:
            return _Linear.apply(x, weight, bias, keep)
        return _linear(x, weight, bias, keep)
    wide = {key: _float(value) for key, value in kwargs.items()}
    return func(*map(_float, args), **wide).to(dtype)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, keep: bool) -> Tensor:
    """x W^T + b, computed in float32."""
    keep, bias = keep and _is_frozen(weight), _float(bias)
    if _packs() and (keep or x.numel() // x.shape[-1] >= _MIN_ROWS_PACKED):
        packed = _copy_of(weight, _packed, keep)
        return _by_rows(x, len(weight), lambda rows: _packed_linear(rows.contiguous(), packed, bias))
    wide = _copy_of(weight, Tensor.float, keep)
    return _by_rows(x, len(weight), lambda rows: F.linear(rows, wide, bias))


def _packs() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _packed(weight: Tensor) -> Tensor:
    """A weight in float32, in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.float())


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in float32, of a weight in oneDNN's layout."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _is_frozen(weight: Tensor) -> bool:
    """Whether copies of a weight can be kept: a model's weight, not changed by training."""
    return isinstance(weight, nn.Parameter) and not weight.requires_grad and not weight.is_inference()


def _copy_of(weight: Tensor, convert: Callable[[Tensor], Tensor], keep: bool) -> Tensor:
    """`convert(weight)`; with `keep`, which the weight must allow (`_is_frozen`), converted once."""
    if not keep:
        return convert(weight.detach())
    # `weight.data += x`, as in a merge of adapters, changes neither the version nor the place, but bits of all numbers.
    bits = weight.view(torch.int16).flatten()
    sample = bits[:: max(1, bits.numel() // _SAMPLED)].sum(dtype=torch.int64).item()
    state, (before, copies) = (weight._version, weight.data_ptr(), sample), _kept.get(weight, (None, {}))
    if state != before:
        copies = {}
        _kept[weight] = state, copies
    if convert not in copies:
        with torch.inference_mode(False):  # the copy may be needed by a backward pass
            copies[convert] = convert(weight.detach())
    return copies[convert]


class _Linear(torch.autograd.Function):
    """x W^T + b; keeps the 16-bit weight for the backward pass, not its float32 copy. The weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep: bool) -> Tensor:
        # Not as a saved tensor: to save it, checkpointing would compute the last product of a layer again.
        ctx.weight, ctx.keep = weight, keep and _is_frozen(weight)
        return _linear(x, weight, bias, keep)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        convert = Tensor.bfloat16 if gradient_dtype(gradients[0]) == torch.bfloat16 else Tensor.float
        weight = _copy_of(ctx.weight, convert, ctx.keep)
        return _by_rows(gradients[0], weight.shape[1], lambda rows: rows @ weight, weight.dtype), None, None, None


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
