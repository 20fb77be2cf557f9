"""`torch.cuda` of the fake device: an H200, streams without effect, and graphs that replay recorded operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from fake_gpu.device import CUDA
from fake_gpu.graph import Graph

NAME = "NVIDIA H200 (fake)"
PROPERTIES = SimpleNamespace(
    name=NAME,
    gcnArchName=NAME,  # as PyTorch's builds for CUDA have it
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150_000_000_000,
    L2_cache_size=60 << 20,
    shared_memory_per_block_optin=232448,
    warp_size=32,
)


class Stream:
    """A stream without effect: all work is synchronous."""

    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Event(Stream):
    """An event; a millisecond is between any two."""

    def record(self, *_: Any) -> None:
        pass

    def elapsed_time(self, _end: Any) -> float:
        return 1.0


class Generator(torch.Generator):
    """A generator of the CPU that reports the fake device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        generator = super().__new__(cls, "cpu")
        generator.fake_device = torch.device(device)
        return generator

    @property
    def device(self) -> torch.device:
        return self.fake_device


@contextmanager
def unchanged(_selected: Any) -> Iterator[None]:
    """A stream or a device is selected."""
    yield


@contextmanager
def graph(recorded: Graph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
    with recorded.recording():
        yield


def replace_torch_cuda() -> None:
    """Replace the functions of torch.cuda by those of the fake device, for the rest of the process."""
    constants = {"memory_allocated": 0, "max_memory_allocated": 1 << 20, "current_device": 0, "device_count": 1}
    no_ops = ["synchronize", "empty_cache", "reset_peak_memory_stats", "set_device", "init", "_lazy_init"]
    for name, value in constants.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    for name in no_ops:
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.is_available = lambda: True
    torch.cuda.is_initialized = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: Graph.active is not None
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.get_device_properties = lambda *_: PROPERTIES
    torch.cuda.get_device_name = lambda *_: PROPERTIES.name
    torch.cuda.get_device_capability = lambda *_: (PROPERTIES.major, PROPERTIES.minor)
    torch.cuda.mem_get_info = lambda *_: (PROPERTIES.total_memory, PROPERTIES.total_memory)
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph = Stream, Event, Graph
    torch.cuda.stream, torch.cuda.device, torch.cuda.graph = unchanged, unchanged, graph
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    torch.Generator = Generator
