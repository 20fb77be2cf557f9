"""The fake GPU: PyTorch's results, and CUDA's errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a process with PyTorch for each test

ROOT = Path(__file__).parents[2]


def run(memory: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process with a fake GPU."""
    paths = [ROOT / "tools/fake_gpu/site", ROOT, ROOT / "kernels"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"KVQ_FAKE_GPU": memory, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", "import torch\n" + code], env=environment, capture_output=True, text=True
    )


def check(memory: str, code: str) -> None:
    """Run Python code with a fake GPU; it must succeed."""
    done = run(memory, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("memory", ["host", "none"])
def test_tensors_know_their_device(memory):
    check(
        memory,
        """
x, y = torch.ones(3, device="cuda"), torch.ones(3)
assert torch.cuda.is_available() and x.is_cuda and x.device == torch.device("cuda", 0) and y.device.type == "cpu"
for moved in (x[1:], x.view(3, 1), x.half(), x.clone(), y.to("cuda"), y.cuda(), y.to(x)):
    assert moved.device.type == "cuda"
assert x.cpu().device.type == x.to("cpu").device.type == y.device.type == "cpu" and x.is_cuda
layer = torch.nn.Linear(3, 3).to("cuda")
assert layer.weight.is_cuda and layer(x).is_cuda
with torch.device("cuda"):
    assert torch.nn.Linear(3, 3).weight.is_cuda
assert torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).is_cuda
""",
    )


def test_properties_are_those_of_a_cuda_build():
    """There `gcnArchName` is the device's name; tuning tables must not be looked up by it."""
    check(
        "host",
        """
from kvq_cli.benchmarking.machine import machine
from kvq_kernels.tuning import family
properties = torch.cuda.get_device_properties(0)
assert properties.gcnArchName == properties.name and family(torch.device("cuda")) == "sm_90"
assert machine(torch.device("cuda"))["gpu"]["architecture"] == "sm_90"
""",
    )


@pytest.mark.parametrize("memory", ["host", "none"])
@pytest.mark.parametrize("code", ["x + y", "torch.cat([x, y])", "torch.nn.functional.linear(x, torch.eye(3))"])
def test_two_devices_are_refused(memory, code):
    done = run(memory, f"x, y = torch.ones(3, device='cuda'), torch.ones(3)\n{code}")
    assert "Expected all tensors to be on the same device" in done.stderr


def test_division_by_a_host_number_multiplies_by_its_reciprocal():
    check(
        "host",
        """
x = torch.arange(1, 1000, dtype=torch.float32)
on_gpu = (x.cuda() / 3).cpu()
assert torch.equal(on_gpu, x * (torch.ones(()) / 3)) and not torch.equal(on_gpu, x / 3)
assert torch.equal((x.cuda() / torch.tensor(3.0).cuda()).cpu(), x / 3)
assert x.cuda().sum().item() == x.sum().item() and x.cuda().tolist() == x.tolist()
""",
    )


def test_large_products_are_zeros_where_kernels_are_skipped():
    check(
        "skip",
        """
from torch.nn.functional import linear, scaled_dot_product_attention
x, weight = torch.ones(1, 2048, 1024, device="cuda"), torch.ones(1024, 1024, device="cuda")
assert linear(x, weight).shape == x.shape and linear(x, weight).is_cuda
assert (linear(x, weight) == 0).all() and (linear(x[:, :2], weight) == 1024).all()
assert (linear(x.cpu(), weight.cpu()) == 1024).all()
q = torch.ones(1, 8, 2048, 64, device="cuda")
assert scaled_dot_product_attention(q, q, q, is_causal=True).shape == q.shape
""",
    )


def test_graphs_replay_and_refuse_host_reads_during_capture():
    check(
        "host",
        """
x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = 2 * x
graph.replay()
assert y.tolist() == [2, 2, 2]
x.fill_(5)
graph.replay()
assert y.tolist() == [10, 10, 10]
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
except RuntimeError as error:
    assert "synchronizes with the host" in str(error)
else:
    raise AssertionError
""",
    )


def test_graphs_replay_operations_with_tensors_of_their_own():
    """A product that is broadcast over rows copies its operand first."""
    check(
        "host",
        """
x, weight, graph = torch.ones(2, 4, 3, 5, device="cuda"), torch.ones(4, 5, 5, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x @ weight
for value in (1, 2):
    weight.fill_(value)
    graph.replay()
    assert (y == 5 * value).all() and y.is_cuda
""",
    )


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["host", "none"])
def test_launches_run_compiled_code_and_refuse_host_pointers(memory):
    check(
        memory,
        f"""
from kvq_kernels.assign_centroids import assign_centroids
points, centroids = (torch.randn(2, n, 4, generator=torch.Generator().manual_seed(n)) for n in (40, 256))
codes, _ = assign_centroids(points.cuda(), centroids.cuda(), backend="triton")
assert codes.is_cuda
if {memory!r} == "host":
    assert torch.equal(codes.cpu().long(), torch.cdist(points.double(), centroids.double()).argmin(-1))
try:
    assign_centroids(points, centroids, backend="triton")
except ValueError as error:
    assert "cpu tensor" in str(error)
else:
    raise AssertionError
""",
    )
