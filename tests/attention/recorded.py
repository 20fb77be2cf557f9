"""A stand-in for CUDA graphs on any device: operations are recorded with the tensors they worked on, and repeated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

READS_BACK = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_copy.host")


class RecordedGraph:
    """A `Graph` that any device can make: operations and interpreted kernels, with all numbers of the host as they were
    when it was recorded. What reads a tensor back raises RuntimeError, as under a CUDA graph.

    Recording computes, which a CUDA graph does not: the first `replay` after it therefore does nothing.
    """

    made: list[RecordedGraph] = []

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.fresh, self.replays = True, 0
        self.made.append(self)

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        run = GridExecutor.__call__

        def launched(executor: GridExecutor, *args, **kwargs) -> None:
            def again() -> None:
                with _disable_current_modes():
                    run(executor, *args, **dict(kwargs))

            self.work.append(again)
            again()

        GridExecutor.__call__ = launched
        try:
            with _Recorder(self.work):
                return work()
        finally:
            GridExecutor.__call__ = run

    def replay(self) -> None:
        self.replays += 1
        if self.fresh:
            self.fresh = False
            return
        for again in self.work:
            again()


class _Recorder(TorchDispatchMode):
    def __init__(self, work: list[Callable[[], None]]) -> None:
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1]
        if name in READS_BACK:
            raise RuntimeError(f"{name} reads back from a device that records")
        out = function(*args, **kwargs)
        given = {id(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor) and id(one) not in given]
        shared = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        own = [one.untyped_storage().data_ptr() not in shared for one in made]

        def again() -> None:
            actual = [one for one in tree_leaves(function(*args, **kwargs)) if isinstance(one, Tensor)]
            actual = [one for one in actual if id(one) not in given]
            for before, now, alone in zip(made, actual, own, strict=True):
                if alone:  # a view shows what its base holds
                    before.copy_(now)

        self._work.append(again)
        return out
