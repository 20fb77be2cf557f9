"""Static reports: how machine code is read, and the limits that every ahead-of-time launch keeps."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import pytest
from kvq_kernels import machine_code, static
from kvq_kernels.aot_cases import KINDS, Launch, launches, operations

compiles = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="Triton's disassembler is part of its wheel for x86_64"
)
#: Other test processes share the cores.
WORKERS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0020*/                   I2F.F16 R4, R2 ;
.L_x_0:
        /*0030*/              @!P0 HMMA.16816.F32 R4, R4, R2, R4 ;
        /*0040*/                   NOP ;
        /*0050*/                   LOP3.LUT R2, R2, 0x3, RZ, 0xc0, !PT ;
        /*0060*/               @P0 BRA `(.L_x_0) ;
        /*0070*/                   FADD R1, R1, R1 ;
        /*0080*/              @!P1 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
""".splitlines()


@pytest.mark.parametrize("value", ["1", None])
def test_compiling_processes_do_not_interpret(monkeypatch, value):
    """Nor does this one stop to."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    with static._without_interpreter():
        assert "TRITON_INTERPRET" not in os.environ
    assert os.environ.get("TRITON_INTERPRET") == value


@pytest.fixture
def code():
    return machine_code.read_nvidia(SASS)


def test_the_main_loop_is_the_smallest_with_matrix_products(code):
    assert machine_code.main_loop(code) == {"HMMA": 1, "LOP3": 1, "BRA": 1}


def test_inner_loops_with_products_are_counted_as_often_as_they_run(code):
    product = "HMMA.16816.F32 R4, R4, R2, R4 ;"
    outer = [".L_x_1:", product, *code[code.index(".L_x_0:") :]]
    inner = [line.replace("HMMA.16816.F32", "HMMA.1688.F32.TF32") for line in outer[2:]]
    assert machine_code.main_loop(outer[:2] + inner) == {"HMMA": 2, "BRA": 2, "LOP3": 1, "FADD": 1}
    assert machine_code.main_loop(outer[:2] + inner, 3) == {"HMMA": 4, "BRA": 4, "LOP3": 3, "FADD": 1}
    assert machine_code.main_loop(outer, 3) == {"HMMA": 4, "BRA": 4, "LOP3": 3, "FADD": 1}
    idle = [line for line in inner if not line.startswith("HMMA")]
    assert machine_code.main_loop(outer[:2] + idle, 3) == {"BRA": 2, "HMMA": 1, "LOP3": 1, "FADD": 1}


def test_without_matrix_products_it_is_the_innermost_loop_that_reads(code):
    scalar = [line for line in code if not line.startswith("HMMA")]
    assert machine_code.main_loop(scalar) == {"BRA": 2, "LDG": 1, "I2F": 1, "LOP3": 1, "FADD": 1}


def test_without_loops_it_is_the_whole_kernel():
    assert machine_code.main_loop(["LDG.E R2", "FADD R1, R2", "EXIT ;"]) == {"LDG": 1, "FADD": 1, "EXIT": 1}
    assert machine_code.main_loop([]) is None


def test_amd_loops():
    text = """
\t.vgpr_count:     40
\t.vgpr_spill_count: 2
.LBB0_1:                                ; loop
\tglobal_load_dword v1, v2, off
\ts_waitcnt vmcnt(0)
\tv_cvt_f32_ubyte0_e32 v1, v1
\tv_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]
\ts_cbranch_scc1 .LBB0_1
.LBB0_2:                                ; tail
\tv_mfma_f32_16x16x4_f32 v[0:3], v4, v6, v[0:3]
\ts_cbranch_scc1 .LBB0_2
\ts_endpgm
"""
    compiled = machine_code.read({"amdgcn": text})
    loop = machine_code.main_loop(compiled.lines)
    assert (compiled.registers, compiled.spills) == (40, 8)
    assert loop == {"global_load_dword": 1, "v_cvt_f32_ubyte0_e32": 1, "v_mfma_f32_16x16x16_f16": 1}
    assert [op for op in loop if machine_code.converts(op)] == ["v_cvt_f32_ubyte0_e32"]


@pytest.mark.parametrize("opcode", ["I2F", "I2FP", "UI2F", "I2HFMA2", "v_cvt_f16_u16_e32"])
def test_conversions(opcode):
    assert machine_code.converts(opcode)


@pytest.mark.parametrize("opcode", ["F2I", "F2FP", "IMAD", "v_cvt_f16_f32_e32", "v_cvt_i32_f32_e32"])
def test_other_opcodes_are_no_conversions(opcode):
    assert not machine_code.converts(opcode)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"error": "Error: x"}, "does not compile"),
        ({"spills": 8}, "8 bytes per thread spill"),
        ({"shared": 232449}, "232448 at most"),
        ({"i2f": 1}, "integer-to-float"),
        ({"per_number": 4.6}, "4.5 at most"),
        ({"per_number": 0.0}, "not found"),
        ({"kind": "codebook", "per_number": 6.1}, "6.0 at most"),
        ({"kind": "codebook", "per_number": 5.9}, None),
        ({"kind": "none", "per_number": 0.0, "i2f": 3}, None),
        ({"spills": 8, "allowed_spills": 8}, None),
        ({"kind": "transform", "i2f": 1}, "integer-to-float"),
        ({"kind": "transform", "narrow_stores": 2}, "2 narrow stores"),
        (
            {"kind": "transform", "expected_products": 8, "opcodes": {"HGMMA": 7}},
            "7 products of a warp group in the loop, not 8",
        ),
        ({"kind": "transform", "expected_products": 8, "opcodes": {"HGMMA": 8}}, None),
        ({"target": "sm_80", "per_number": 9.0}, None),
        ({"target": "sm_80", "shared": 166913}, "166912 at most"),
        ({"target": "sm_100", "tensor_memory": 513}, "512 at most"),
    ],
)
def test_faults(changes, message):
    report = static.Report(
        **{"operation": "a", "name": "b", "target": "sm_90", "kind": "uniform", "per_number": 4.5} | changes
    )
    assert report.faults() == [] if message is None else message in " ".join(report.faults())


def test_every_operation_has_launches():
    root = Path(static.__file__).parent
    folders = sorted(path.parent.name for path in root.glob("*/__init__.py"))
    assert operations() == folders
    for operation in operations():
        cases = launches(operation, "sm_90")
        assert cases
        for name, launch in cases.items():
            assert isinstance(launch, Launch) and launch.kind in KINDS, (operation, name)
            assert (launch.numbers > 0 and launch.bits > 0) or launch.kind == "none", (operation, name)


@pytest.mark.slow
def test_widest_formats_have_every_kernel():
    for target in static.TARGETS:
        widest, everything = static.widest_formats(target), static.all_launches([target])
        assert set(widest) <= set(everything) and len(set(widest)) == len(widest) < len(everything)

        def kernels(keys, target=target):
            return {launches(operation, target)[name].kernel.__name__ for operation, name, _ in keys}

        assert kernels(widest) == kernels(everything)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "slow"), [(static.LIMITED_TARGET, True), *((target, False) for target in static.TARGETS)]
)
def test_launches_keep_the_limits(target, slow):
    """All launches on the limited target, slow ones in a separate test; on other targets the widest formats."""
    keys = static.widest_formats(target)
    if target == static.LIMITED_TARGET:
        keys = [key for key in static.all_launches([target]) if launches(key[0], target)[key[1]].slow == slow]
    reports = {f"{report.operation}/{report.name}": report for report in static.reports(keys, WORKERS)}
    assert set(reports) == {f"{operation}/{name}" for operation, name, _ in keys}
    assert not {name: report.faults() for name, report in reports.items() if report.faults()}


@compiles
@pytest.mark.slow
def test_large_dense_tokens_fit_the_least_shared_memory():
    keys = [("decode_attention", name, "sm_89") for name in ("fp16-dim256", "fp32")]
    assert [report.faults() for report in static.reports(keys, WORKERS)] == [[], []]


@pytest.mark.slow
@compiles
def test_reports_are_cached_by_source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = ("decode_attention", "combine", "sm_90")
    [compiled] = static.reports([key], 1)
    assert compiled.registers > 0 and compiled.faults() == []
    [path] = tmp_path.rglob("*.json")
    path.write_text(json.dumps(asdict(compiled) | {"registers": 12345}))
    assert [read.registers for read in static.reports([key], 1)] == [12345]
    [tried] = static.reports([key], 1, {"columns": 8})
    assert tried.registers == 12345  # the launch does not depend on columns


@compiles
def test_compile_errors_are_reported(monkeypatch):
    launch = launches("decode_attention", "sm_90")["combine"]
    monkeypatch.setattr(static.triton, "compile", lambda *a, **k: 1 / 0)
    report = static.read("decode_attention", "combine", "sm_90", launch, None)
    assert report.faults() == ["does not compile: ZeroDivisionError: division by zero"]
