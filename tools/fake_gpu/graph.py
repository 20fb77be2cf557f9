"""A CUDA graph's stand-in: operations and launches are recorded with their tensors, and repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

#: What a GPU refuses while it records: they wait for it.
HOST_READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


class Graph:
    """As torch.cuda.CUDAGraph. Recording computes here, which a CUDA graph does not: the first replay does nothing.

    Nothing may be read back while it records (RuntimeError), and numbers of the host stay as they were.
    """

    active: ClassVar[Graph | None] = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.work: list[Callable[[], None]] = []
        self.fresh, self.replays = True, 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        Graph.active = self
        try:
            with _Recorder(self.work):
                yield
        finally:
            Graph.active = None

    def add(self, launch: Callable[[], None]) -> None:
        """Record a kernel's launch."""
        self.work.append(launch)

    def replay(self) -> None:
        self.replays += 1
        if self.fresh:
            self.fresh = False
            return
        with _disable_current_modes():
            for again in self.work:
                again()


class _Recorder(TorchDispatchMode):
    def __init__(self, work: list[Callable[[], None]]) -> None:
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1]
        if name in HOST_READS:
            raise RuntimeError(f"{name} reads back from a device that records")
        out = function(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known, shared = {id(x) for x in given}, {x.untyped_storage()._cdata for x in given}
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor) and id(x) not in known]
        owned = [x.untyped_storage()._cdata not in shared for x in results]

        def again() -> None:
            repeated = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
            repeated = [x for x in repeated if id(x) not in known]
            for before, now, own in zip(results, repeated, owned, strict=True):
                if own:  # a view shows what its base holds
                    before.copy_(now)

        self._work.append(again)
        return out
