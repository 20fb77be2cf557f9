"""The PTX executor: its results, and that it reports every fault that a GPU would have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx.block import Blocks
from ptx.execute import prepare
from ptx.memory import Fault, Global
from ptx.program import parse

HEAD = """
.visible .entry kernel(.param .u64 .ptr .global .align 1 kernel_param_0)
{
	.reg .b32 %r<99>; .reg .b64 %rd<99>; .reg .pred %p<9>; .reg .b16 %rs<9>;
	ld.param.b64 %rd1, [kernel_param_0];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd3, %rd1, %rd2;
	shl.b32 %r2, %r1, 2;
"""


def run(body: str, out: torch.Tensor, threads: int = 32, blocks: int = 1, shared: int = 1024) -> torch.Tensor:
    """`out` after a kernel that gets its address. %r1: the thread, %r2: four times that, %rd3: the address of its four
    bytes in `out`."""
    program = parse(HEAD + body + "\n\tret;\n}\n")
    memory = Global([(out.data_ptr(), out.data_ptr() + out.nbytes)])
    places = [(i, 0, 0) for i in range(blocks)]
    parameters = {"kernel_param_0": out.data_ptr()}
    with np.errstate(all="ignore"):
        Blocks(threads, places, (blocks, 1, 1), parameters, memory, shared).run(prepare(program))
    return out


def integers(count: int = 32) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def floats(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers + [0.0] * (32 - len(numbers)), dtype=torch.float32)


@pytest.mark.parametrize(
    "instruction, expected",
    [
        ("add.s32 %r3, %r1, -7", lambda i: i - 7),
        ("shr.s32 %r4, %r3, 1; mov.b32 %r3, %r4", lambda i: (i - 9) >> 1),
        ("shr.u32 %r4, %r3, 28; mov.b32 %r3, %r4", lambda i: ((i - 9) & 0xFFFFFFFF) >> 28),
        ("div.s32 %r4, %r3, 4; mov.b32 %r3, %r4", lambda i: int((i - 9) / 4)),
        ("rem.s32 %r4, %r3, 4; mov.b32 %r3, %r4", lambda i: i - 9 - 4 * int((i - 9) / 4)),
        ("shl.b32 %r3, %r1, %r2", lambda i: i << (4 * i) & 0xFFFFFFFF if 4 * i < 32 else 0),
        ("bfe.s32 %r3, %r1, 2, 1", lambda i: -(i >> 2 & 1)),
        ("bfe.u32 %r3, %r1, 1, 3", lambda i: i >> 1 & 7),
        ("popc.b32 %r3, %r1", lambda i: i.bit_count()),
        ("prmt.b32 %r3, %r1, 16909060, 0x4047", lambda i: (4 << 24) | (i << 16) | (4 << 8) | 1),
        ("shf.l.wrap.b32 %r3, 0xC0000000, %r1, 33", lambda i: 2 * i + 1),
        ("shf.r.clamp.b32 %r3, %r1, 5, 32", lambda i: 5),
        ("{ .reg .b32 high; and.b32 high, %r1, 24; or.b32 %r3, high, 1; }", lambda i: i & 24 | 1),
        ("mul.hi.u32 %r3, %r1, 0xC0000000", lambda i: i * 0xC0000000 >> 32),
        ("mad.lo.s32 %r3, %r1, %r1, %r2", lambda i: i * i + 4 * i),
        ("lop3.b32 %r3, %r1, 12, 3, 0xCA", lambda i: (i & 12) | (~i & 3)),
        ("setp.lt.s32 %p1, %r1, 7; selp.b32 %r3, 5, %r1, %p1", lambda i: 5 if i < 7 else i),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r3, {%rs2, %rs1}", lambda i: i << 16),
        ("shfl.sync.bfly.b32 %r3, %r1, 5, 31, -1", lambda i: i ^ 5),
        ("shfl.sync.idx.b32 %r3, %r1, 3, 0x181f, -1", lambda i: i // 8 * 8 + 3),
        ("shfl.sync.up.b32 %r3, %r1, 3, 0, -1", lambda i: max(i - 3, 0) if i >= 3 else i),
        ("shfl.sync.down.b32 %r3, %r1, 3, 31, -1", lambda i: i + 3 if i < 29 else i),
        ("redux.sync.max.s32 %r3, %r1, -1", lambda i: 31),
        ("max.relu.s32 %r3, %r3, -3", lambda i: max(i - 9, 0)),
    ],
)
def test_integers(instruction, expected):
    begin = "add.s32 %r3, %r1, -9;"
    out = run(f"{begin} {instruction}; st.global.b32 [%rd3 + 0], {{ %r3 }};", integers())
    wanted = [expected(i) for i in range(32)]
    assert out.tolist() == [(n + 2**31) % 2**32 - 2**31 for n in wanted]


@pytest.mark.parametrize(
    "instruction, numbers, expected",
    [
        ("fma.rn.f32 %r4, %r3, %r3, 0fBF800000", [1 + 2**-12], [(1 + 2**-12) ** 2 - 1]),
        ("mul.rn.ftz.f32 %r4, %r3, 0f3F000000", [1e-38, 4.0], [0.0, 2.0]),
        ("max.f32 %r4, %r3, 0f00000000", [float("nan"), -1.0, 2.0], [0.0, 0.0, 2.0]),
        ("ex2.approx.ftz.f32 %r4, %r3", [3.0, -2.0, float("-inf")], [8.0, 0.25, 0.0]),
        ("cvt.rn.f16.f32 %rs1, %r3; cvt.f32.f16 %r4, %rs1", [1 + 2**-11, 1e-7], [1.0, 2**-23]),
        ("cvt.rn.bf16.f32 %rs1, %r3; cvt.f32.bf16 %r4, %rs1", [1 + 3 * 2**-8, 1.0], [1 + 2**-6, 1.0]),
        ("cvt.rni.s32.f32 %r5, %r3; cvt.rn.f32.s32 %r4, %r5", [2.5, -3.5, 7.9], [2.0, -4.0, 8.0]),
        ("cvt.rzi.s32.f32 %r5, %r3; cvt.rn.f32.s32 %r4, %r5", [2.5, -3.5, 7.9], [2.0, -3.0, 7.0]),
        ("cvt.rn.f16x2.f32 %r5, %r3, 0f40000000; mov.b32 {_, %rs1}, %r5; cvt.f32.f16 %r4, %rs1", [3.0], [3.0]),
    ],
)
def test_floats(instruction, numbers, expected):
    out = run(f"ld.global.b32 %r3, [%rd3]; {instruction}; st.global.b32 [%rd3], %r4;", floats(numbers))
    assert out[: len(numbers)].tolist() == expected


def test_ones_of_float16_comparisons_read_as_bfloat16():
    """The 1 of `set.eq.f16x2`, read as bfloat16 by one-hot products, is 2^-7."""
    out = run("mov.b32 %r3, 0; set.eq.f16x2.f16x2 %r4, %r3, %r3; st.global.b32 [%rd3], %r4;", integers())
    assert (out.view(torch.bfloat16) == 2.0**-7).all()


def test_divergent_threads_meet():
    """Every thread iterates as often as it should; guarded-off instructions do nothing."""
    body = """
	mov.b32 %r3, 0;
	setp.eq.s32 %p1, %r1, 0;
	@%p1 bra $L__after;
$L__loop:
	add.s32 %r3, %r3, 2;
	setp.lt.s32 %p2, %r3, %r1;
	@%p2 bra $L__loop;
$L__after:
	add.s32 %r3, %r3, 100;
	setp.ne.s32 %p3, %r1, 5;
	@%p3 st.global.b32 [%rd3], %r3;
"""
    out = run(body, integers()).tolist()
    assert out == [0 if i == 5 else 100 + (i + 1) // 2 * 2 for i in range(32)]


REVERSED = """
	mov.b32 %r3, global_smem; add.s32 %r4, %r3, %r2;
	st.shared.b32 [%r4], %r1;
	{barrier}
	sub.s32 %r5, 252, %r2;
	ld.shared.b32 %r6, [%r5];
	st.global.b32 [%rd3], %r6;
"""


def test_barriers():
    out = run(REVERSED.format(barrier="bar.sync 0;"), integers(64), threads=64, blocks=3)
    assert out.tolist() == list(range(63, -1, -1))


def test_missing_barriers_are_detected():
    with pytest.raises(Fault, match="another warp has written"):
        run(REVERSED.format(barrier="bar.warp.sync -1;"), integers(64), threads=64)


def test_early_reuse_of_shared_memory_is_detected():
    again = "st.shared.b32 [%r4], %r1; bar.sync 0; ld.shared.b32 %r6, [%r5]; bar.sync 0; st.shared.b32 [%r4], %r6;"
    begin = "mov.b32 %r3, global_smem; add.s32 %r4, %r3, %r2; sub.s32 %r5, 252, %r2;"
    run(begin + again, integers(64), threads=64)
    with pytest.raises(Fault, match="without a barrier between"):
        run(begin + again.replace("%r6, [%r5]; bar.sync 0;", "%r6, [%r5];"), integers(64), threads=64)


@pytest.mark.parametrize("apart", [False, True])
def test_writes_after_reads_of_several_warps_are_detected(apart):
    """All warps read the first word, at once or (apart) one after the other; then a thread of the last one writes
    it."""
    body = """
	mov.b32 %r3, global_smem; setp.lt.s32 %p2, %r1, 32;
	{read}
	{barrier}
	setp.eq.s32 %p1, %r1, 32;
	@%p1 st.shared.b32 [%r3], %r1;
"""
    read = "ld.shared.b32 %r4, [%r3];"
    read = f"@%p2 {read} @!%p2 {read}" if apart else read
    run(body.format(read=read, barrier="bar.sync 0;"), integers(64), threads=64)
    with pytest.raises(Fault, match="without a barrier between"):
        run(body.format(read=read, barrier=""), integers(64), threads=64)


def test_warps_may_use_neighbouring_bytes():
    """The first warp writes the lower half of each word, the second the upper half; no warp may read both yet."""
    body = """
	mov.b32 %r3, global_smem; shr.u32 %r4, %r1, 5; and.b32 %r5, %r1, 31;
	shl.b32 %r6, %r5, 2; add.s32 %r3, %r3, %r6; shl.b32 %r7, %r4, 1; add.s32 %r7, %r3, %r7;
	mov.b32 {{%rs1, %rs2}}, %r1;
	st.shared.b16 [%r7], %rs1;
	{barrier}
	ld.shared.b32 %r8, [%r3];
	st.global.b32 [%rd3], %r8;
"""
    out = run(body.format(barrier="bar.sync 0;"), integers(64), threads=64)
    assert out.tolist() == 2 * [i | i + 32 << 16 for i in range(32)]
    with pytest.raises(Fault, match="another warp has written"):
        run(body.format(barrier=""), integers(64), threads=64)


def test_asynchronous_copies_finish_at_the_wait():
    copied = """
	mov.b32 %r3, global_smem; add.s32 %r4, %r3, %r2;
	cp.async.ca.shared.global [ %r4 + 0 ], [ %rd3 + 0 ], 0x4, 4;
	cp.async.commit_group;
	{wait}
	ld.shared.b32 %r6, [%r4]; add.s32 %r6, %r6, 1; st.global.b32 [%rd3], %r6;
"""
    start = torch.arange(32, dtype=torch.int32)
    assert run(copied.format(wait="cp.async.wait_group 0;"), start.clone()).tolist() == list(range(1, 33))
    assert run(copied.format(wait="cp.async.wait_group 1;"), start.clone()).tolist() == [0] * 32  # poison and 1


@pytest.mark.parametrize(
    "instruction, reason",
    [
        ("ld.global.b32 %r3, [%rd3+4]", "ends 0 before"),
        ("st.global.b32 [%rd3+-4], %r1", "nearest tensor"),
        ("ld.global.v2.b32 {%r3, %r4}, [%rd3]", "no multiple of 8"),
        ("ld.shared.b32 %r3, [%r2+1024]", "1024 bytes"),
        ("ld.shared.v2.b32 {%r3, %r4}, [%r2]", "no multiple of 8"),
    ],
)
def test_addresses_are_checked(instruction, reason):
    with pytest.raises(Fault, match=reason):
        run(instruction + ";", integers())


@pytest.mark.parametrize(
    "instruction",
    ["atom.global.add.u32 %r3, [%rd3], %r1", "add.sat.s32 %r3, %r1, 1", "min.xorsign.abs.f32 %r4, %r3, %r3"],
)
def test_unknown_instructions_are_refused(instruction):
    with pytest.raises(NotImplementedError, match=instruction.split()[0]):
        run(instruction + ";", integers())


CALLED = """
.func twice_less(.param .b64 twice_less_param_0, .param .b32 twice_less_param_1)
;
.visible .entry kernel(.param .u64 .ptr .global .align 1 kernel_param_0)
.reqntid 32
{
	.reg .b32 %r<9>; .reg .b64 %rd<9>;
	ld.param.b64 %rd1, [kernel_param_0];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd3, %rd1, %rd2;
	CALLS
	st.global.b32 [%rd3 + 128], { %r1 };
	ret;
}
.func twice_less(
	.param .b64 twice_less_param_0,
	.param .b32 twice_less_param_1
)
{
	.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;
	ld.param.b32 %r1, [twice_less_param_1];
	ld.param.b64 %rd1, [twice_less_param_0];
	setp.lt.s32 %p1, %r1, 8;
	@%p1 bra $L__BB1_2;
	{ .reg .b32 sum; add.s32 sum, %r1, %r1; sub.s32 %r1, sum, 8; }
	st.global.b32 [%rd1 + 0], { %r1 };
	ret;
$L__BB1_2:
	st.global.b32 [%rd1 + 0], { 5 };
	ret;
}
"""
CALL = """{ // callseq 0
	.param .b64 param0;
	.param .b32 param1;
	st.param.b32 [param1], %r1;
	st.param.b64 [param0], %rd3;
	call.uni twice_less, (param0, param1);
	}"""


def called(calls: str, out: torch.Tensor) -> torch.Tensor:
    program = parse(CALLED.replace("CALLS", calls))
    memory = Global([(out.data_ptr(), out.data_ptr() + out.nbytes)])
    blocks = Blocks(32, [(0, 0, 0)], (1, 1, 1), {"kernel_param_0": out.data_ptr()}, memory, 0)
    blocks.run(prepare(program))
    return out


def test_called_functions_have_separate_registers():
    """Registers of the kernel with the same names keep their values, and threads return from any return statement."""
    again = CALL.replace("callseq 0", "callseq 1")
    out = called(CALL + "\n\tadd.s32 %r1, %r1, 1;\n\t" + again, integers(64))
    assert out[:32].tolist() == [2 * i - 8 if i >= 8 else 5 for i in range(1, 33)]
    assert out[32:].tolist() == list(range(1, 33))


@pytest.mark.parametrize("call", ["call.uni (retval0), twice_less, (param0);", "call.uni other, (param0);"])
def test_unsupported_calls_are_refused(call):
    with pytest.raises(ValueError, match="not a call of a function that returns nothing"):
        called(call, integers(64))
