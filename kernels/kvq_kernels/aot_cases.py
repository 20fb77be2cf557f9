"""The launches that every operation ships, as they are compiled and read without a GPU.

An operation's folder has a `aot_cases.py` with one function:

    def launches(gpu: str) -> dict[str, Launch]

name -> launch, at shapes of real models, with the configuration that `tuning` has for the GPU family `gpu` ("sm_90",
"gfx942"). Tensors are on PyTorch's meta device: a shape and a type without memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

#: What is in a program's loop: "dense" 16-bit numbers, "uniform" codes, "codebook" codes; "none": no cached numbers.
KINDS = ("dense", "uniform", "codebook", "none")


@dataclass(frozen=True)
class Launch:
    """kernel: a `triton.jit` function. arguments: in the order of its arguments, up to the first of `constants` (its
    compile-time arguments): meta tensors, ints, floats, None or tuples of these. options: Triton's, of the launch.

    kind: of `KINDS`, which limit of instructions per number is its own. numbers: cached numbers that one program reads
    in one turn of its main loop (of the whole kernel where it has no loop). bits: that it reads of memory per number.
    turns: how often loops within it that multiply matrices, too, run then. slow: to compile, and thus not for every
    target.
    """

    kernel: Any
    arguments: tuple
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})
    kind: str = "none"
    numbers: int = 0
    bits: float = 0.0
    turns: int = 1
    slow: bool = False


def operations() -> list[str]:
    """Folders of this package that ship kernels."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/aot_cases.py"))


def launches(operation: str, gpu: str) -> dict[str, Launch]:
    """What one operation ships for a GPU family."""
    return import_module(f"kvq_kernels.{operation}.aot_cases").launches(gpu)
