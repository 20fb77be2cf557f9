"""Compiled kernels of all ahead-of-time cases against PyTorch in float64, on a GPU or by executing PTX (see `ptx`).

A test runs the launches that `test_static.py` compiles, so that nothing is compiled twice: `LaunchRecorder` asserts
it. Without a GPU set KVQ_TEST_PTX=sm_90 (`make test` does). Other kernel tests run so, too, but compile for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from checks import (
    assign_centroids,
    combine,
    quantize_pack,
    quantized_matvec,
    rematerialize,
    squat_quantize,
    transform_attention,
    transform_pack,
)
from kernel_cases import DEVICE, Case, codebook, dense, directions, random_outliers, uniform
from kvq_kernels import fields, static, tuning
from kvq_kernels.aot_cases import Launch, launches, operations
from kvq_kernels.assign_centroids.kernel import assign_kernel
from kvq_kernels.decode_attention import Codebook, Dense, Directions, Outliers, Side, Uniform
from kvq_kernels.decode_attention.aot_cases import COMBINED, DIM, GROUP, HEADS, SEVERAL_QUERIES, launch_cases
from kvq_kernels.decode_attention.pages import cells
from kvq_kernels.quantize_pack.aot_cases import layouts
from kvq_kernels.quantized_matvec.aot_cases import cases
from kvq_kernels.rematerialize.aot_cases import SPAN, SPLITS, calls
from kvq_kernels.squat_quantize.aot_cases import RANK
from kvq_kernels.transform_attention import aot_cases as transforms
from kvq_kernels.transform_pack.aot_cases import SHAPES as PACKED
from paged_cases import paged
from triton.runtime.jit import JITFunction

from kvq_cli.codecs.subspace import SubspaceCodec

pytestmark = pytest.mark.gpu


class LaunchRecorder:
    """Records the compiled kernel of every launch."""

    def __init__(self, monkeypatch) -> None:
        self.compiled = []
        run = JITFunction.run

        def recording_run(*arguments, **options):
            self.compiled.append(run(*arguments, **options))
            return self.compiled[-1]

        monkeypatch.setattr(JITFunction, "run", recording_run)

    def assert_ran(self, cases: dict[str, Launch], names: Iterable[str]) -> None:
        """Assert that each named launch ran, compiled exactly as by `static`."""
        target = triton.runtime.driver.active.get_current_target()
        for name in names:
            launch = cases[name]
            source = static.describe(launch, target)
            same_source = [kernel for kernel in self.compiled if kernel.src.hash() == source.hash()]
            assert same_source, f"{name} was not executed; {self._differences(source)}"
            compiled = triton.compile(source, target=target, options=launch.options)
            assert compiled.hash in {kernel.hash for kernel in same_source}, (
                f"{name}: other options than {launch.options}"
            )

    def _differences(self, source) -> list[dict]:
        """(executed, wanted) where signature, constants or attributes of the kernel's launches differ from `source`."""
        differences = []
        for kernel in self.compiled:
            if kernel.src.fn is source.fn:
                parts = {
                    part: (getattr(kernel.src, part), getattr(source, part))
                    for part in ("signature", "constants", "attrs")
                }
                differences.append(
                    {
                        (part, key): (executed.get(key), wanted.get(key))
                        for part, (executed, wanted) in parts.items()
                        for key in executed.keys() | wanted.keys()
                        if executed.get(key) != wanted.get(key)
                    }
                )
        return differences


@pytest.fixture
def recorder(monkeypatch):
    return LaunchRecorder(monkeypatch)


#: Operations with a test in this file.
TESTED_OPERATIONS: set[str] = set()


def each_case(
    operation: str, cases: Iterable[str] | None = None, default: str | None = None, families: tuple[str, ...] = ()
):
    """Parametrize a test with (name, launch_names): a case, and the launches of the operation that it must run.

    cases: their names, with which launches' names end (default: the launches' names). default: the case that runs the
    launches whose names end with none. families: a case of each kernel of the operation; the others are slow.
    """
    TESTED_OPERATIONS.add(operation)
    all_launches = launches(operation, "sm_90")
    names_of_case = {case: [] for case in cases or all_launches}
    for name in all_launches:
        matching = [case for case in names_of_case if name == case or name.endswith(f"-{case}")]
        names_of_case[max(matching, key=len) if matching else default].append(name)
    assert families and set(families) <= set(names_of_case)
    marks = {name: () if name in families else pytest.mark.slow for name in names_of_case}
    params = [pytest.param(name, names, id=name, marks=marks[name]) for name, names in names_of_case.items()]
    return pytest.mark.parametrize(("name", "launch_names"), params)


def tuned_launches(operation: str) -> dict[str, Launch]:
    """Launches of an operation as tuned for the GPU that tests run on."""
    return launches(operation, tuning.family(DEVICE))


def packing_mode(packed: Uniform) -> str:
    """`mode` of `kernel_cases.uniform`."""
    if packed.zero is None or packed.hybrid:
        return "hybrid-" * packed.hybrid + ("extra" if packed.sign is not None else "inside")
    return "asymmetric"


def random_like(packed):
    """Maker of random numbers in the storage format of a case."""
    if isinstance(packed, Dense):
        return partial(dense, stored=packed.numbers.dtype)
    if isinstance(packed, Codebook):
        heads, books, entries, _ = packed.centroids.shape
        kinds = {"normalize": packed.mean is not None, "per_token": packed.token_scale is not None}
        return partial(codebook, block=packed.block, entries=entries, share=DIM // books, book_heads=heads, **kinds)
    if isinstance(packed, Directions):
        return partial(directions, bits=packed.bits, unit=packed.unit)
    return partial(uniform, bits=packed.bits, axis=packed.axis, group=packed.group, mode=packing_mode(packed))


def outliers_like(lists: Outliers | None):
    """Maker of random outliers in the format of a case; None: without."""
    if lists is None:
        return None
    return partial(random_outliers, capacity=lists.index.shape[-1], pooled=lists.start is not None)


def attention_case(name: str, lengths: list[int]) -> Case:
    """Random numbers for one of `launch_cases`."""
    keys, values, rope = launch_cases()[name]
    sides: tuple[Side, Side] = (keys, values)
    case = Case(
        *(random_like(side.packed) for side in sides),
        lengths,
        dim=keys.ring.shape[3],
        heads=HEADS,
        group=GROUP,
        dtype=keys.ring.dtype,
        sinks=keys.sinks.shape[2],
        unpacked=(13, 13),  # the ring then holds 32 tokens: strides are multiples of 16, as in the case
        rope=rope and (rope.style, DIM),
        outliers=tuple(outliers_like(side.outliers) for side in sides),
        norm=keys.norm is not None,
    )
    if keys.pages is None:
        return case
    return paged(case, keys.pages.block_size, cells(keys)[1])[1]


@each_case(
    "decode_attention",
    [*launch_cases(), *SEVERAL_QUERIES],
    default="fp16",
    families=(
        "fp16",
        "fp16-dim256",
        "fp32",
        "kivi-2bit-g32",
        "innerq-2bit-hybrid",
        "channel-2bit",
        "kvquant-2bit",
        "kivi-2bit-g32-paged",
    ),
)
def test_decode_attention(name, launch_names, recorder):
    # A store for 512 tokens: strides are multiples of 16, as in the case.
    stored, queries = SEVERAL_QUERIES.get(name, (name, 1))
    tuned, case = tuned_launches("decode_attention"), attention_case(stored, [390])
    if queries > 1:
        case.several(queries)
    case.check(splits=1)
    for launch in {*COMBINED} & {*launch_names}:
        combine.check(tuned[launch].arguments[3])
    recorder.assert_ran(tuned, launch_names)


@each_case("assign_centroids", families=("assign-size1-16", "sums-size1-16", "assign-size4-256", "sums-size4-256"))
def test_assign_centroids(name, launch_names, recorder):
    tuned = tuned_launches("assign_centroids")
    fixed, count = tuned[name].constants, 1104  # more than a program's points; a multiple of 16, as in the case
    if tuned[name].kernel is assign_kernel:
        points, centroids = (assign_centroids.normal(2, n, fixed["SIZE"]) for n in (count, fixed["ENTRIES"]))
        assign_centroids.check(points, centroids)
    else:
        assign_centroids.check_sums(fixed["COLUMNS"], count, fixed["ENTRIES"])
    recorder.assert_ran(tuned, launch_names)


@each_case("quantize_pack", families=("token-2bit-g32-asymmetric", "channel-2bit-g32-hybrid-extra"))
def test_quantize_pack(name, launch_names, recorder):
    layout = layouts()[name]
    tokens = 2 * layout.group if layout.axis == "channel" else 176  # a partial tile, but a multiple of 16
    sign = "" if layout.mode == "asymmetric" else layout.sign
    quantize_pack.check(layout.bits, layout.axis, layout.group, layout.dim, torch.float16, layout.mode, sign, tokens)
    recorder.assert_ran(tuned_launches("quantize_pack"), launch_names)


@each_case(
    "quantized_matvec",
    cases(),
    default="values-inner-2bit-asymmetric",
    families=("keys-outer-2bit-asymmetric", "values-inner-2bit-asymmetric"),
)
def test_quantized_matvec(name, launch_names, recorder):
    side, packed = cases()[name]
    stored = {"bits": packed.bits, "packed_group": packed.group, "mode": packing_mode(packed)}
    quantized_matvec.check(side, packed.axis, 320, dim=DIM, heads=2, group=GROUP, **stored)
    recorder.assert_ran(tuned_launches("quantized_matvec"), launch_names)


@each_case("rematerialize", calls("sm_90"), default="latents-2bit", families=("latents-2bit",))
def test_rematerialize(name, launch_names, recorder):
    call = calls("sm_90")[name]
    dim, heads = call.query.shape[2], call.query.shape[1] // call.group
    # Packed tokens are whole groups; at most one tile for layer inputs, which take longest.
    tokens, flush = (150, 128) if call.keys.held.packed.axis == "channel" else (120, 16)
    case = rematerialize.Case(
        [tokens],
        *(random_like(side.held.packed) for side in (call.keys, call.values)),
        rank=call.keys.rank,
        dim=dim,
        heads=heads,
        group=call.group,
        dtype=call.query.dtype,
        unpacked=16,  # the ring then holds a multiple of 16 tokens, as in the case
        flush=flush,
        shared=call.keys is call.values,
        contiguous=call.keys.weight.is_contiguous(),
    )
    case.check(SPAN, SPLITS)
    recorder.assert_ran(tuned_launches("rematerialize"), launch_names)


@each_case("transform_attention", families=("2bit",))
def test_transform_attention(name, launch_names, recorder):
    shape = transforms.SHAPES[name]
    case = transform_attention.Case(
        [170],
        (shape.keys, shape.keys) if shape.listed else shape.keys,
        (shape.values, shape.values) if shape.listed else shape.values,
        dim=shape.dim,
        heads=1 + shape.listed,
        members=((1,), (0,)) if shape.listed else None,
        group=shape.group,
        dtype=shape.dtype,
        sinks=transforms.SINKS,
        recent=transforms.RING - 16,
        rope=shape.style,
        gain=(shape.gain, shape.gain),
    )
    if shape.page:
        case = case.in_pages(shape.page, fields.BLOCK)[1]
    values = {"half_sums": 1} if shape.half_sums else {}
    with tuning.trying("transform_attention", values):
        case.check(floor=1.5e-3)
    recorder.assert_ran(tuned_launches("transform_attention"), launch_names)


@each_case("squat_quantize", families=("squat-2bit-g32",))
def test_squat_quantize(name, launch_names, recorder):
    tuned = tuned_launches("squat_quantize")
    fixed = tuned[name].constants
    block = fixed["BLOCK"]
    codec = SubspaceCodec(fixed["BITS"], fixed["GROUP"], fixed["D"], rank=RANK, strength=0.05, block=block)
    squat_quantize.assert_same_bits(codec, *squat_quantize.random_keys(codec, tokens=128), block)
    recorder.assert_ran(tuned, launch_names)


@each_case("transform_pack", families=("keys-2bit",))
def test_transform_pack(name, launch_names, recorder):
    shape = PACKED[name]
    tensors = transform_pack.random_tensors(shape.widths, shape.dim, 1, shape.gain)
    transform_pack.assert_same_bits(tensors, shape.values, transform_pack.random_tokens(tensors, 1, dtype=shape.dtype))
    recorder.assert_ran(tuned_launches("transform_pack"), launch_names)


def test_every_operation_has_a_test_here():
    assert sorted(TESTED_OPERATIONS) == operations()


@triton.jit
def _multiply(
    a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    T: tl.constexpr = tl.float32,
):  # fmt: skip
    """out [M, N] = 3 a b, a being [K, M] if A, b [N, K] if B: a product, and one that accumulates. T: of the sums."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.trans(tl.load(a + k[:, None] * M + m[None, :])) if A else tl.load(a + m[:, None] * K + k[None, :])
    right = tl.trans(tl.load(b + n[:, None] * K + k[None, :])) if B else tl.load(b + k[:, None] * N + n[None, :])
    product = tl.dot(left, right, out_dtype=T)
    tl.store(out + m[:, None] * N + n[None, :], product + tl.dot(left, right, product, out_dtype=T))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("size", "warps"), [((64, 16, 32), 4), ((128, 32, 64), 4), ((64, 128, 16), 8), ((16, 8, 64), 1)]
)
def test_products(size, warps, transposed, dtype):
    """Products of one warp or four, from registers and from shared memory in every layout: a check of `ptx`."""
    g = torch.Generator().manual_seed(0)
    (m, n, k), (first, second) = size, transposed
    a, b = torch.randn(m, k, generator=g).to(dtype), torch.randn(k, n, generator=g).to(dtype)
    out = torch.full((m, n), torch.nan)
    _multiply[(1,)](
        a.T.contiguous() if first else a, b.T.contiguous() if second else b, out, *size, *transposed, num_warps=warps
    )
    torch.testing.assert_close(out.double(), 3 * (a.double() @ b.double()), atol=1e-4, rtol=1e-5)


def test_products_with_float16_sums():
    """Of four warps; small integers, whose sums are exact."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, size, generator=g).half() for size in ((64, 32), (32, 16)))
    out = torch.full((64, 16), torch.nan)
    _multiply[(1,)](a, b, out, 64, 16, 32, False, False, tl.float16, num_warps=4)
    assert torch.equal(out, 3 * (a.float() @ b.float()))
