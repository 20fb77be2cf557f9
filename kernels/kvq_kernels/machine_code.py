"""Reading compiled kernels: registers, spills, and the opcodes of the main loop.

NVIDIA's code is disassembled by the tools in Triton's wheel, AMD's is read from the assembly that Triton keeps.
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
#: Matrix products of packed numbers: float16, or where there are none bfloat16. Products of the tail are float32, those
#: of outliers bfloat16 beside float16.
_PACKED_PRODUCTS = (
    re.compile(r"[HQ]G?MMA(?!.*(TF32|BF16))|UTC\w*MMA|v_mfma_(?!\w*(x\d*_?f32|bf16))|v_dot"),
    re.compile(r"HG?MMA.*BF16|v_mfma_.*bf16"),
)
#: All matrix products.
_PRODUCT = re.compile(r"[HQ]G?MMA|UTC\w*MMA|v_mfma_|v_dot")
_READS = re.compile(r"LD(?!C)|UBLKCP|UTMALDG|global_load|buffer_load|flat_load|ds_read")
_FROM_INTEGER = re.compile(r"I2F|I2HF|UI2F|v_cvt_(f32|f16|f64)_([iu]\d+|ubyte)")
#: Stores of 16 bits or less to shared memory.
NARROW_STORES = ("STS.U16", "STS.U8", "STS.S16", "STS.S8")
_JUMPS = ("BRA", "s_cbranch", "s_branch")
#: Instructions without an issue slot of a lane: padding, and AMD's scalar unit.
_FREE = re.compile(r"NOP|s_")


@dataclass(frozen=True)
class Code:
    """Registers and spilled bytes per thread; lines: one instruction or label each."""

    registers: int
    spills: int
    lines: list[str]


def check_tools() -> None:
    """Raise OSError where Triton's wheel has no disassembler (it has on x86_64)."""
    for name in ("cuobjdump", "nvdisasm"):
        if not (TOOLS / name).exists():
            raise OSError(f"{TOOLS / name} is missing: this build of Triton has no disassembler")


def read(asm: Mapping[str, str | bytes]) -> Code:
    """Code of a compiled kernel, from its `asm`."""
    if "amdgcn" in asm:
        return _read_amd(str(asm["amdgcn"]))
    cubin = asm["cubin"]
    assert isinstance(cubin, bytes)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        text = _tool("nvdisasm", "-c", file.name)
    registers, stack = (_number(rf"{key}:(\d+)", usage) for key in ("REG", "STACK"))
    return Code(registers, stack, read_nvidia(text.splitlines()))


def read_nvidia(lines: list[str]) -> list[str]:
    """Labels and instructions of nvdisasm's output, without predicates."""
    code = []
    for line in lines:
        if label := re.match(r"\s*(\.L_x_\d+:)", line):
            code.append(label[1])
        elif op := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*.*)", line):
            code.append(op[1])
    return code


def _number(pattern: str, text: str) -> int:
    """The number that a pattern matches."""
    match = re.search(pattern, text)
    assert match is not None, pattern
    return int(match[1])


def _read_amd(text: str) -> Code:
    registers, spills = (_number(rf"\.{key}:\s+(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count"))
    code = []
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\d+_\d+:)", line):
            code.append(label[1])
        elif op := re.match(r"\s+([a-z]\w*\b.*)", line):
            code.append(op[1])
    return Code(registers, 4 * spills, code)


def main_loop(code: list[str], inner_iterations: int = 1) -> dict[str, int] | None:
    """Count of each opcode in an iteration of the main loop, which reads cached numbers; None for no code.

    It is the smallest loop with 16-bit matrix products; without any, the largest innermost loop that reads memory;
    without loops, the whole kernel. Loops of exact tokens, which are behind it, are left out. Most frequent opcodes
    first. inner_iterations: how often inner loops with matrix products run (1: there are none, and the main loop is the
    smallest); other inner loops are counted once.
    """
    code = _first_part(code)
    loops = _loops(code)
    multiplying = ([body for body in loops if any(kind.match(line) for line in body)] for kind in _PACKED_PRODUCTS)
    if candidates := next(filter(None, multiplying), None):
        first = min(candidates, key=lambda body: (code.index(body[0]), -len(body)))
        candidates = [body for body in candidates if body is first or _inside(body, first)]
        if inner_iterations > 1:
            candidates = [body for body in candidates if not any(_inside(body, other) for other in candidates)]
        body = min(candidates, key=len)
    else:
        reading = [body for body in loops if any(_READS.match(line) for line in body)]
        innermost = [body for body in reading if not any(_inside(other, body) for other in reading)]
        body = max(innermost, key=len, default=code)
    opcodes = _opcodes(body)
    repeated = [inner for inner in loops if _inside(inner, body) and any(map(_PRODUCT.match, inner))]
    for inner in repeated:
        if not any(_inside(other, inner) for other in repeated):
            opcodes.update({op: (inner_iterations - 1) * count for op, count in _opcodes(inner).items()})
    return {op: count for op, count in opcodes.most_common() if not _FREE.match(op)} or None


def _first_part(code: list[str]) -> list[str]:
    """Code up to the first end of the kernel behind a loop."""
    labels: set[str] = set()
    looped = False
    for at, line in enumerate(code):
        if line.endswith(":"):
            labels.add(line[:-1])
        elif line.startswith(_JUMPS):
            looped |= _target(line) in labels
        elif looped and line.startswith(("EXIT", "s_endpgm")):
            return code[: at + 1]
    return code


def _opcodes(code: list[str]) -> Counter[str]:
    """Count of each opcode, without its suffixes except those of `NARROW_STORES`."""
    names = (line.split()[0].rstrip(";") for line in code if not line.endswith(":"))
    return Counter(name if name in NARROW_STORES else name.split(".")[0] for name in names)


def _loops(code: list[str]) -> list[list[str]]:
    """Bodies of all loops: instructions up to a jump to the first of them."""
    labels, loops = {}, []
    for at, line in enumerate(code):
        if line.endswith(":"):
            labels[line[:-1]] = at
        elif line.startswith(_JUMPS) and _target(line) in labels:
            loops.append(code[labels[_target(line)] : at + 1])
    return loops


def _target(line: str) -> str:
    """Label that a jump goes to; empty without one."""
    found = re.search(r"\.L(?:_x_|BB)[\d_]+", line)
    return found[0] if found else ""


def _inside(inner: list[str], outer: list[str]) -> bool:
    """Whether a loop is inside another; loops are identified by the unique label that they begin with."""
    return inner is not outer and len(inner) < len(outer) and inner[0] in outer


def converts(opcode: str) -> bool:
    """Whether an opcode converts integers to floating point."""
    return _FROM_INTEGER.match(opcode) is not None


def _tool(name: str, *arguments: str) -> str:
    """Output of one of `TOOLS`."""
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout
