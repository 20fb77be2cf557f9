"""What is shipped, as it is compiled, against PyTorch in float64: on a GPU, or what a GPU would execute (see `ptx`).

These are the launches that `test_static.py` compiles, every one of them and made the same way, so that nothing shipped
is compiled twice; `Executed` holds that. Without a GPU they run where KVQ_TEST_PTX names one (`make test` does); other
tests of kernels can be run so, too, which compiles for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from checks import assign_centroids, quantize_pack, quantized_matvec, rematerialize, squat_quantize
from kernel_cases import DEVICE, Case, codebook, dense, sparse, uniform
from kvq_kernels import static, tuning
from kvq_kernels.aot_cases import Launch, launches, operations
from kvq_kernels.assign_centroids.kernel import assign_kernel
from kvq_kernels.decode_attention import Codebook, Dense, Outliers, Side, Uniform
from kvq_kernels.decode_attention.aot_cases import DIM, GROUP, HEADS, shipped
from kvq_kernels.quantize_pack.aot_cases import layouts
from kvq_kernels.quantized_matvec.aot_cases import cases
from kvq_kernels.rematerialize.aot_cases import SPAN, SPLITS, calls
from kvq_kernels.squat_quantize.aot_cases import RANK
from triton.runtime.jit import JITFunction

from kvq_cli.codecs.subspace import SubspaceCodec

pytestmark = pytest.mark.gpu


class Executed:
    """What kernels were launched as, from when it is made."""

    def __init__(self, monkeypatch) -> None:
        self.objects = []
        run = JITFunction.run

        def recorded(*arguments, **options):
            self.objects.append(run(*arguments, **options))
            return self.objects[-1]

        monkeypatch.setattr(JITFunction, "run", recorded)

    def has(self, shipped: dict[str, Launch], names: Iterable[str]) -> None:
        """Each of these launches was executed: the very object that `static` compiles."""
        target = triton.runtime.driver.active.get_current_target()
        for name in names:
            launch = shipped[name]
            source = static.describe(launch, target)
            alike = [one for one in self.objects if one.src.hash() == source.hash()]
            assert alike, f"{name} was not executed; {self._others(source)}"
            compiled = triton.compile(source, target=target, options=launch.options)
            assert compiled.hash in {one.hash for one in alike}, f"{name} has other options: {launch.options}"

    def _others(self, source) -> list[dict]:
        """In what the kernel's executed launches differ from one."""
        parts = ("signature", "constants", "attrs")
        return [
            {
                (part, key): (own.get(key), wanted.get(key))
                for part in parts
                for own, wanted in [(getattr(one.src, part), getattr(source, part))]
                for key in own.keys() | wanted.keys()
                if own.get(key) != wanted.get(key)
            }
            for one in self.objects
            if one.src.fn is source.fn
        ]


@pytest.fixture
def executed(monkeypatch):
    return Executed(monkeypatch)


EXECUTED: set[str] = set()
"""Operations that have a test here."""


def every(operation: str, chosen: Iterable[str] | None = None, rest: str | None = None):
    """Runs a test with each case's name and the shipped launches that it must execute: each is some case's.

    chosen: names of cases, with which names of launches end; as a rule these are the launches' own. rest: the case that
    executes those that end with none.
    """
    EXECUTED.add(operation)
    shipped = launches(operation, "sm_90")
    found = {name: [] for name in chosen or shipped}
    for name in shipped:
        own = [case for case in found if name == case or name.endswith(f"-{case}")]
        found[max(own, key=len) if own else rest].append(name)
    return pytest.mark.parametrize(("name", "launched"), found.items(), ids=list(found))


def on_this_gpu(operation: str) -> dict[str, Launch]:
    return launches(operation, tuning.family(DEVICE))


def mode(packed: Uniform) -> str:
    if packed.zero is None or packed.hybrid:
        return "hybrid-" * packed.hybrid + ("extra" if packed.sign is not None else "inside")
    return "asymmetric"


def like(packed):
    """Random numbers that are stored as a shipped side's are."""
    if isinstance(packed, Dense):
        return dense
    if isinstance(packed, Codebook):
        heads, shares, entries, _ = packed.centroids.shape
        kinds = {"normalize": packed.mean is not None, "per_token": packed.token_scale is not None}
        return partial(codebook, block=packed.block, entries=entries, share=DIM // shares, own_heads=heads, **kinds)
    return partial(uniform, bits=packed.bits, axis=packed.axis, group=packed.group, mode=mode(packed))


def beside(outliers: Outliers | None):
    together = outliers is not None and outliers.start is not None
    return outliers and partial(sparse, slots=outliers.index.shape[3], together=together)


def case(name: str, lengths: list[int]) -> Case:
    keys, values, rope = shipped()[name]
    sides: tuple[Side, Side] = (keys, values)
    return Case(
        *(like(side.packed) for side in sides),
        lengths,
        dim=DIM,
        heads=HEADS,
        group=GROUP,
        dtype=keys.ring.dtype,
        sinks=keys.sinks.shape[2],
        waiting=(13, 13),  # and room for 32, a multiple of 16 as the shipped one is
        rope=rope and (rope.style, DIM),
        outliers=tuple(beside(side.outliers) for side in sides),
        norm=keys.norm is not None,
    )


@pytest.mark.slow  # to compile
@every("decode_attention", shipped(), rest="fp16")
def test_decode_attention(name, launched, executed):
    # Room for 512 tokens: strides are multiples of 16 where the shipped ones are.
    found, own = on_this_gpu("decode_attention"), case(name, [390])
    own.check(splits=1)
    if "combine" in launched:
        own.check(splits=found["combine"].arguments[3] - 1)
    executed.has(found, launched)


@pytest.mark.slow
@every("assign_centroids")
def test_assign_centroids(name, launched, executed):
    found = on_this_gpu("assign_centroids")
    fixed, count = found[name].constants, 1104  # more than a program's own, in sixteens as the shipped ones are
    if found[name].kernel is assign_kernel:
        points, centroids = (assign_centroids.normal(2, n, fixed["SIZE"]) for n in (count, fixed["ENTRIES"]))
        assign_centroids.check(points, centroids)
    else:
        assign_centroids.check_sums(fixed["COLUMNS"], count, fixed["ENTRIES"])
    executed.has(found, launched)


@pytest.mark.slow
@every("quantize_pack")
def test_quantize_pack(name, launched, executed):
    one = layouts()[name]
    tokens = 2 * one.group if one.axis == "channel" else 176  # which fill no tile, but are sixteens
    sign = "" if one.mode == "asymmetric" else one.sign
    quantize_pack.check(one.bits, one.axis, one.group, one.dim, torch.float16, one.mode, sign, tokens)
    executed.has(on_this_gpu("quantize_pack"), launched)


@pytest.mark.slow
@every("quantized_matvec", cases(), rest="values-inner-2bit-asymmetric")
def test_quantized_matvec(name, launched, executed):
    side, packed = cases()[name]
    stored = {"bits": packed.bits, "packed_group": packed.group, "mode": mode(packed)}
    quantized_matvec.check(side, packed.axis, 320, dim=DIM, heads=2, group=GROUP, **stored)
    executed.has(on_this_gpu("quantized_matvec"), launched)


@pytest.mark.slow
@every("rematerialize", calls("sm_90"), rest="latents-2bit")
def test_rematerialize(name, launched, executed):
    call = calls("sm_90")[name]
    dim, heads = call.query.shape[2], call.query.shape[1] // call.group
    # Whole groups are packed, one tile at most where all channels of a layer are read: these take the longest.
    tokens, flush = (150, 128) if call.keys.held.packed.axis == "channel" else (120, 16)
    own = rematerialize.Case(
        [tokens],
        *(like(side.held.packed) for side in (call.keys, call.values)),
        rank=call.keys.rank,
        dim=dim,
        heads=heads,
        group=call.group,
        dtype=call.query.dtype,
        waiting=16,  # and room for `flush` tokens, a multiple of 16 as the shipped one is
        flush=flush,
        shared=call.keys is call.values,
        folded=call.keys.weight.is_contiguous(),
    )
    own.check(SPAN, SPLITS)
    executed.has(on_this_gpu("rematerialize"), launched)


@pytest.mark.slow
@every("squat_quantize")
def test_squat_quantize(name, launched, executed):
    found = on_this_gpu("squat_quantize")
    fixed = found[name].constants
    block = fixed["BLOCK"]
    codec = SubspaceCodec(fixed["BITS"], fixed["GROUP"], fixed["D"], rank=RANK, strength=0.05, block=block)
    squat_quantize.same(codec, *squat_quantize.made(codec, tokens=128), block)
    executed.has(found, launched)


def test_every_operation_is_executed():
    assert sorted(EXECUTED) == operations()


@triton.jit
def _multiply(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """out [M, N] = a b, where A and B say that a [K, M] and b [N, K] lie transposed; and twice the same."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.trans(tl.load(a + k[:, None] * M + m[None, :])) if A else tl.load(a + m[:, None] * K + k[None, :])
    right = tl.trans(tl.load(b + n[:, None] * K + k[None, :])) if B else tl.load(b + k[:, None] * N + n[None, :])
    product = tl.dot(left, right)
    tl.store(out + m[:, None] * N + n[None, :], product + tl.dot(left, right, product))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("size", "warps"), [((64, 16, 32), 4), ((128, 32, 64), 4), ((64, 128, 16), 8), ((16, 8, 64), 1)]
)
def test_products(size, warps, transposed, dtype):
    """Of one warp or of four, from registers and from shared memory of every pattern: what is executed on a CPU is
    right about them, too."""
    g = torch.Generator().manual_seed(0)
    (m, n, k), (first, second) = size, transposed
    a, b = torch.randn(m, k, generator=g).to(dtype), torch.randn(k, n, generator=g).to(dtype)
    out = torch.full((m, n), torch.nan)
    _multiply[(1,)](
        a.T.contiguous() if first else a, b.T.contiguous() if second else b, out, *size, *transposed, num_warps=warps
    )
    torch.testing.assert_close(out.double(), 3 * (a.double() @ b.double()), atol=1e-4, rtol=1e-5)
