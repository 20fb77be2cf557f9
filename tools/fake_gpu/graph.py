"""A fake CUDA graph: records operations and launches with their tensors, and replays them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

#: Operations that synchronize with the host, which a GPU refuses during capture.
HOST_READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


class Graph:
    """The interface of torch.cuda.CUDAGraph. Unlike a CUDA graph's, its capture computes the results, so that the first
    replay does nothing. A host read during capture is a RuntimeError; host numbers keep their captured values.
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
        """Record a kernel launch."""
        self.work.append(launch)

    def replay(self) -> None:
        self.replays += 1
        if self.fresh:
            self.fresh = False
            return
        # Devices were checked at capture, in calls of functions. The operations that these consist of are recorded, and
        # tensors between them have no mark of the fake device.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
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
            raise RuntimeError(f"{name} synchronizes with the host during capture")
        out = function(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known, shared = {id(x) for x in given}, {x.untyped_storage()._cdata for x in given}
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor) and id(x) not in known]
        owned = [x.untyped_storage()._cdata not in shared for x in results]

        def again() -> None:
            repeated = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
            repeated = [x for x in repeated if id(x) not in known]
            for before, now, own in zip(results, repeated, owned, strict=True):
                if own:  # a view changes with its base
                    before.copy_(now)

        self._work.append(again)
        return out
