"""Launches that are compiled ahead of time: every kernel at shapes of real models, in every tuned configuration.

`static.py` compiles and measures them without a GPU; tests run the same ones. An operation's folder has an
`aot_cases.py` with one function:

    def launches(gpu: str) -> dict[str, Launch]

name -> launch, with the configuration that `tuning` has for the GPU family `gpu` ("sm_90", "gfx942"). Tensors are on
PyTorch's meta device: shape and type without memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

#: Cached numbers that the main loop reads: 16-bit "dense", "uniform" codes, "codebook" codes, codes of a "transform"'s
#: components, or "none".
KINDS = ("dense", "uniform", "codebook", "transform", "none")


@dataclass(frozen=True)
class Launch:
    """One kernel launch without its grid.

    kernel:    a `triton.jit` function.
    arguments: its run-time arguments in order: meta tensors, ints, floats, None or tuples of these.
    constants: its compile-time arguments, which follow. options: Triton's launch options.
    kind:      one of `KINDS`; selects the limit of instructions per number.
    numbers:   cached numbers that a program reads in an iteration of its main loop (of the kernel, without a loop).
    bits:      read from memory per number.
    inner_iterations: how often inner loops with matrix products run in an iteration of the main loop.
    warpgroup_products: how many of Hopper's matrix products an iteration has; None: not checked.
    spills:    bytes per thread that may spill.
    slow:      takes minutes to compile, and thus is not compiled for every target.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=lambda: {"num_warps": 4})
    kind: str = "none"
    numbers: int = 0
    bits: float = 0.0
    inner_iterations: int = 1
    warpgroup_products: int | None = None
    spills: int = 0
    slow: bool = False


def operations() -> list[str]:
    """Names of the operations: folders of this package with an `aot_cases.py`."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/aot_cases.py"))


def launches(operation: str, gpu: str) -> dict[str, Launch]:
    """All launches of one operation on a GPU family, by name."""
    return import_module(f"kvq_kernels.{operation}.aot_cases").launches(gpu)


def stored_bytes(*tensors: Tensor | None) -> int:
    """Bytes of all tensors that are not None."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)
