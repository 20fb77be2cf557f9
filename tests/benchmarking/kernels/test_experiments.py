"""Kernel experiments at tiny sizes in Triton's interpreter: correctness, byte counts, shapes, timer."""

from __future__ import annotations

import pytest
import torch
from kvq_kernels.decode_attention import aot_cases
from kvq_kernels.quantize_pack.launch import outputs

from kvq_cli.benchmarking.kernels import decode, quantize, run, transform
from kvq_cli.benchmarking.kernels.catalog import EXPERIMENTS, select_experiments
from kvq_cli.benchmarking.kernels.experiment import Sizes, relative_error
from kvq_cli.benchmarking.kernels.timing import Timer
from kvq_cli.benchmarking.shapes import SHAPES
from kvq_cli.errors import UsageError

CPU, DRY = torch.device("cpu"), Sizes(dry=True)


@pytest.mark.parametrize(
    "name", ["quantize_pack", "squat_quantize", "assign_centroids", "transform_attention", "transform_pack"]
)
def test_cases_are_correct(name):
    rows = list(run.check(select_experiments([name]), DRY, CPU))
    assert rows and all(row["right"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode_attention", "quantized_matvec"])
def test_slow_cases_are_correct(name):
    rows = list(run.check(select_experiments([name]), DRY, CPU))
    assert rows and all(row["right"] for row in rows)


@pytest.mark.parametrize("module", [decode, transform])
def test_a_wrong_result_exceeds_the_allowed_error(monkeypatch, module):
    name = f"{module.__name__.split('.')[-1]}_attention"
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: 1.01 * real(*a, **k | {"backend": "torch"}))
    case = next(case for case in next(iter(select_experiments([name])[0].shapes(DRY, CPU)))[1] if case.error)
    error, allowed = case.error()
    assert error > allowed


@pytest.mark.parametrize("sizes", [Sizes(dry=False), DRY])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_shapes_and_cases_are_distinct(name, sizes):
    """Without duplicates, and with the shape that `tune` times."""
    measured = list(EXPERIMENTS[name].shapes(sizes, CPU))
    shapes = [tuple(shape.items()) for shape, _ in measured]
    assert len(set(shapes)) == len(shapes) and (sizes.dry or 0 <= EXPERIMENTS[name].tuned_at < len(measured))
    for _, cases in measured:
        names = [case.name for case in cases]
        assert len(set(names)) == len(names) and all(case.nbytes > 0 for case in cases)
    assert len(run.all_shape_keys([EXPERIMENTS[name]], sizes, CPU)) == len(measured)


def test_bytes_of_stores_agree_with_the_lower_bounds():
    """KERNELS.md: 4.3 TB/s read 2 bits with groups of 32 (3 bits with scales) of 1 x 128k tokens in 23 us."""
    cases = {case.name: case for case in EXPERIMENTS["decode_attention"].shapes(Sizes(dry=False), CPU).__next__()[1]}
    numbers = 2 * 4096 * 8 * 128
    assert cases["kvq fp16"].nbytes == cases["sdpa math"].nbytes == 2 * numbers
    assert cases["kvq kivi-2bit-g32"].nbytes == numbers * 3 // 8
    assert cases["kvq kivi-4bit-g128"].nbytes == numbers * 4.25 // 8
    assert numbers // 4 < cases["kvq temporal-2bit"].nbytes  # and its codebooks


def test_bytes_of_quantization_are_those_of_the_kernels_operands():
    """Numbers read and tensors written, at a full size."""
    shape = SHAPES["llama-3.2-1b"]
    x = torch.empty(1, shape.kv_heads, 1024, shape.head_dim, dtype=torch.float16, device="meta")
    measured = EXPERIMENTS["quantize_pack"].shapes(Sizes(dry=False), CPU)
    key, cases = next(iter(measured))
    assert key == {"model": "llama-3.2-1b", "context": 1024}
    for case in cases:
        packed = [outputs(x, layout) for layout in quantize._layouts(shape, case.name)]
        tensors = [t for one in packed for t in (one.codes, one.scale, one.zero, one.sign) if t is not None]
        assert case.nbytes == sum(t.nbytes for t in [x, x, *tensors])


def test_bytes_of_transform_codes_are_those_of_the_operands():
    shape = decode.DecodeShape(1, 8, 4096, CPU)
    _, cases = next(iter(EXPERIMENTS["transform_attention"].shapes(Sizes(dry=False), CPU)))
    for case in (case for case in cases if not case.baseline):
        step = transform.random_transform_step(case.extra["store"], shape, 0)
        sides = step.keys.packed, step.values.packed
        stored = [x for packed in sides for x in (*packed.codes, packed.gain)]
        operands = [packed.transform.operands for packed in sides]
        assert case.nbytes == sum(
            x.nbytes for x in [*stored, *(x for one in operands for x in (one.synthesis, one.mean))]
        )
        if case.extra["store"] == "klt-2bit":  # and a byte per token and head
            packed = int(step.keys.count[0])
            assert sum(x.nbytes for x in stored) == 2 * 8 * packed * (2 * 128 // 8 + 1)


def test_transform_codes_of_several_heads_are_correct():
    """In a dry run there is one head."""
    shape = decode.DecodeShape(2, 2, 128, CPU)
    for name in transform.STORES:
        error, allowed = transform._error(name, shape)
        assert 0 < error <= allowed < 1e-2


def test_random_decode_steps_have_the_given_shape_and_seed():
    shape = decode.DecodeShape(3, 2, 256, CPU)
    step = decode.random_decode_step("temporal-2bit", shape, 0)
    keys = step.keys
    assert step.query.shape == (3, 2 * aot_cases.GROUP, aot_cases.DIM) and step.lengths.tolist() == [256] * 3
    assert keys.packed.codes.shape == (3, 2, 64, 128) and keys.packed.centroids.shape[0] == 2
    assert keys.packed.std.shape == (2, 128) and step.rope.coarse.shape[0] * 128 >= 256
    assert int(keys.count[0]) + keys.sinks.shape[2] + decode.RECENT == 256 and keys.ring.shape[2] >= decode.RECENT
    again = decode.random_decode_step("temporal-2bit", shape, 0)
    other = decode.random_decode_step("temporal-2bit", shape, 1)
    assert torch.equal(step.query, again.query) and not torch.equal(step.query, other.query)


def test_relative_error_of_known_vectors():
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x, x) == 0 and relative_error(2 * x, x) == 1
    assert relative_error(torch.tensor([1.0, float("nan")]), x) == float("inf")


def test_unknown_operations_are_refused():
    with pytest.raises(UsageError, match="--operation nonsense: no benchmark for it; valid: decode_attention"):
        select_experiments(["nonsense"])


def test_the_timer_divides_by_the_number_of_calls():
    timer = Timer(CPU)
    found = timer.spread([lambda: None] * 4)
    assert 0 <= found["p20"] <= found["p50"] <= found["p80"] < 1e5 and found["n"] == 1
    assert timer.copies(1) == 1 and timer.copy_rate() > 0
