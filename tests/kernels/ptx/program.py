"""Parser of PTX text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ptx.functions import only_kernel

_STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\b\w+_param_\d+\b")


@dataclass(frozen=True)
class Instruction:
    """`@guard opcode operands`. guard: (predicate register, negated) or None. operands: as written, those in braces as
    a tuple. target: of a branch."""

    opcode: tuple[str, ...]
    operands: tuple[str | tuple[str, ...], ...]
    guard: tuple[str, bool] | None = None
    target: int | None = None

    @cached_property
    def ends(self) -> bool:
        return self.opcode[0] in ("ret", "exit")

    @cached_property
    def parts(self) -> bool:
        """Whether threads may diverge here."""
        return self.target is not None or self.ends

    @cached_property
    def waits(self) -> bool:
        """Whether this waits for other warps of the block."""
        return self.opcode[0] in ("bar", "barrier") and self.opcode[1] != "warp"

    def __str__(self) -> str:
        return ".".join(self.opcode) + " " + ", ".join(map(str, self.operands))


@dataclass(frozen=True)
class Program:
    """A kernel's instructions. parameters: names, in order."""

    parameters: list[str]
    code: list[Instruction]


def parse(text: str) -> Program:
    """Program of a module's only kernel. ValueError for anything that is not an instruction."""
    text = re.sub(r"//[^\n]*|^\s*\.(loc|file)\b[^\n]*", "", text, flags=re.MULTILINE)
    declared, body = only_kernel(text)
    body = _renamed(body)
    labels: dict[str, int] = {}
    found: list[Instruction] = []
    for statement in body.split(";"):
        # Braces around statements can be dropped once registers declared within are renamed.
        while match := re.match(r"[{}\s]+|([$\w]+):", statement):
            if match[1]:
                labels[match[1]] = len(found)
            statement = statement[match.end() :]
        if not statement or statement.startswith("."):
            continue
        match = _STATEMENT.fullmatch(statement.strip())
        if match is None:
            raise ValueError(f"not an instruction: {statement!r}")
        guard = (match[2], bool(match[1])) if match[2] else None
        found.append(Instruction(tuple(match[3].split(".")), _operands(match[4]), guard))
    code = []
    for one in found:
        if one.opcode[0] == "bra":
            one = Instruction(one.opcode, (), one.guard, labels[one.operands[0]])
        code.append(one)
    return Program(_PARAMETER.findall(declared), code)


def _renamed(body: str) -> str:
    """Text with registers that inline assembly declares renamed as the compiler names registers."""
    names = {name: kind for kind, name in re.findall(r"\.reg\s+\.(\w+)\s+([A-Za-z]\w*)\s*;", body)}
    for i, (name, kind) in enumerate(names.items()):
        letters = "p" if kind == "pred" else {"16": "rs", "32": "r", "64": "rd"}[kind[-2:]]
        body = re.sub(rf"(?<![\w.%$]){name}\b", f"%{letters}{900000 + i}", body)
    return body


def _operands(text: str) -> tuple[str | tuple[str, ...], ...]:
    found, depth, word = [], 0, ""
    for letter in text.strip() + ",":
        if letter == "," and depth == 0:
            word = word.strip()
            if word.startswith("{"):
                found.append(tuple(part.strip() for part in word[1:-1].split(",")))
            elif word:
                found.append(word)
            word = ""
            continue
        depth += (letter in "{[") - (letter in "}]")
        word += letter
    return tuple(found)
