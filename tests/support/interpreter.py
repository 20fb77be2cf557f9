"""Triton's interpreter without work whose result it drops: kernels compute the same numbers in a third of the time."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import wraps

import triton.language as tl
from triton.runtime import interpreter


def omit_dropped_work() -> None:
    """Make interpreted kernels faster in this process."""
    # Every sum and product of integers is computed once more in 64 bits and compared with the limits of its type, but
    # the comparison is asserted in debug mode only.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    # Every call of a device function patches triton.language anew, as the launch of its kernel did already.
    patch = interpreter._patch_lang

    @wraps(patch)
    def patch_once(function):
        modules = [module for module in function.__globals__.values() if inspect.ismodule(module)]
        used = [module for module in (tl, tl.core) if module in modules]
        patched = used and not any(tl.core.is_builtin(module.load) for module in used)
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._patch_lang = patch_once
