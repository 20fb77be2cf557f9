"""Reading compiled kernels: registers, spills, and what the main loop is made of.

NVIDIA's code is disassembled by the tools in Triton's wheel, AMD's is read as the assembly that Triton leaves.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
#: Matrix products of packed numbers: of float16, or else of bfloat16. Others are of float32, and those of outliers of
#: pairs of bfloat16 numbers, beside products of float16.
_MATRIX = (
    re.compile(r"[HQ]G?MMA(?!.*(TF32|BF16))|UTC\w*MMA|v_mfma_(?!\w*(x\d*_?f32|bf16))|v_dot"),
    re.compile(r"HG?MMA.*BF16|v_mfma_.*bf16"),
)
#: All products, also those of what is not packed.
_PRODUCT = re.compile(r"[HQ]G?MMA|UTC\w*MMA|v_mfma_|v_dot")
_READS = re.compile(r"LD(?!C)|UBLKCP|UTMALDG|global_load|buffer_load|flat_load|ds_read")
_FROM_INTEGER = re.compile(r"I2F|I2HF|UI2F|v_cvt_(f32|f16|f64)_([iu]\d+|ubyte)")
#: Take no slot of a lane: padding, and AMD's scalar unit.
_FREE = re.compile(r"NOP|s_")


@dataclass(frozen=True)
class Code:
    """registers per thread, spilled bytes per thread; code: one instruction or label per line."""

    registers: int
    spills: int
    code: list[str]


def check_tools() -> None:
    """OSError where Triton's wheel brings no disassembler (it does on x86_64)."""
    for name in ("cuobjdump", "nvdisasm"):
        if not (TOOLS / name).exists():
            raise OSError(f"{TOOLS / name} is missing: this build of Triton brings no disassembler")


def read(asm: Mapping[str, str | bytes]) -> Code:
    """What a compiled kernel's `asm` holds."""
    if "amdgcn" in asm:
        return _read_amd(asm["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        text = _tool("nvdisasm", "-c", file.name)
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    return Code(registers, stack, read_nvidia(text.splitlines()))


def read_nvidia(lines: list[str]) -> list[str]:
    """Labels and instructions of nvdisasm's output, predicates left out."""
    code = []
    for line in lines:
        if label := re.match(r"\s*(\.L_x_\d+:)", line):
            code.append(label[1])
        elif op := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*.*)", line):
            code.append(op[1])
    return code


def _read_amd(text: str) -> Code:
    registers, spills = (int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count"))
    code = []
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\d+_\d+:)", line):
            code.append(label[1])
        elif op := re.match(r"\s+([a-z]\w*\b.*)", line):
            code.append(op[1])
    return Code(registers, 4 * spills, code)


def main_loop(code: list[str], turns: int = 1) -> dict[str, int] | None:
    """How often each opcode is executed in a turn of the loop that reads cached numbers, most frequent first.

    That is the smallest loop that multiplies 16-bit matrices; where there is none, the largest of the innermost loops
    that read memory; where there is no loop, the whole kernel. None for no code. turns: how often each loop within it
    runs that multiplies matrices, too, so that the smallest is not it (1: there are none); others within are counted
    once.
    """
    loops = _loops(code)
    multiply = ([body for body in loops if any(kind.match(line) for line in body)] for kind in _MATRIX)
    if found := next(filter(None, multiply), None):
        if turns > 1:
            found = [body for body in found if not any(_inside(body, other) for other in found)]
        body = min(found, key=len)
    else:
        reading = [body for body in loops if any(_READS.match(line) for line in body)]
        inner = [body for body in reading if not any(_inside(other, body) for other in reading)]
        body = max(inner, key=len, default=code)
    opcodes = _opcodes(body)
    again = [inner for inner in loops if _inside(inner, body) and any(map(_PRODUCT.match, inner))]
    for inner in again:
        if not any(_inside(other, inner) for other in again):
            opcodes.update({op: (turns - 1) * count for op, count in _opcodes(inner).items()})
    return {op: count for op, count in opcodes.most_common() if not _FREE.match(op)} or None


def _opcodes(code: list[str]) -> Counter[str]:
    return Counter(line.split()[0].rstrip(";").split(".")[0] for line in code if not line.endswith(":"))


def _loops(code: list[str]) -> list[list[str]]:
    """Every run of instructions that ends in a jump to its beginning."""
    labels, found = {}, []
    for at, line in enumerate(code):
        if line.endswith(":"):
            labels[line[:-1]] = at
        elif line.startswith(("BRA", "s_cbranch", "s_branch")):
            target = re.search(r"\.L(?:_x_|BB)[\d_]+", line)
            if target and target[0] in labels:
                found.append(code[labels[target[0]] : at + 1])
    return found


def _inside(inner: list[str], outer: list[str]) -> bool:
    """A loop is known by the labels that it begins with: they are unique."""
    return inner is not outer and len(inner) < len(outer) and inner[0] in outer


def converts(opcode: str) -> bool:
    """Does it make a floating-point number of an integer?"""
    return _FROM_INTEGER.match(opcode) is not None


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout
