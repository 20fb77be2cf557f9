"""Triton's driver of the fake device with execution: launches run the compiled PTX in `tests/kernels/ptx`."""

from __future__ import annotations

from typing import Any

from ptx import driver as ptx

from fake_gpu.driver import check_on_device
from fake_gpu.graph import Graph


class Driver(ptx.Driver):
    def __init__(self) -> None:
        super().__init__("sm_90")
        self.launcher_cls = Launcher


class Launcher(ptx.Launcher):
    def __call__(self, *given: Any) -> None:
        check_on_device(given)
        super().__call__(*given)
        if Graph.active is not None:
            Graph.active.add(lambda: super(Launcher, self).__call__(*given))
