"""Triton's cache keys of kernels, made independent of what was launched before.

Triton hashes a kernel's source with that of the functions that it calls and the constants (`tl.constexpr` globals) that
these use, but misses the constants of a function that was not hashed before its caller: `DependenciesFinder` of Triton
3.6 and 3.7 merges them before it computes the function's key. Where kernels share functions, the key of one depends on
whether another was launched earlier in the process, and a compiled kernel on disk is found or not. With callees hashed
first, no constant is missed.

Triton also misses functions that a kernel calls through a constant, as it does those of a storage format: such a
constant has a `cache_key` with their `digest`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from triton.runtime.jit import JITCallable


@cache
def hash_callees_first(module: str) -> None:
    """Compute the key of every kernel that a module defines or imports, the functions that it calls before it. Does
    nothing at a second call, and in Triton's interpreter, which compiles nothing."""
    done: set[int] = set()
    for value in list(vars(sys.modules[module]).values()):
        _hash(value, done)


@cache
def digest(*functions: Any) -> str:
    """Hash of the functions of kernels among the arguments, and of all that they call."""
    done: set[int] = set()
    for function in functions:
        _hash(function, done)
    keys = [function.cache_key for function in functions if isinstance(function, JITCallable)]
    return hashlib.sha256("".join(keys).encode()).hexdigest()[:16]


def _hash(function: Any, done: set[int]) -> None:
    if not isinstance(function, JITCallable) or id(function) in done:
        return
    done.add(id(function))
    for name in _names(function.fn.__code__):
        _hash(function.fn.__globals__.get(name), done)
    function.cache_key  # noqa: B018 -- computed and kept


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
