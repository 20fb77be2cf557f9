"""Inlines calls of a module's functions: the executor knows none."""

from __future__ import annotations

import re

_HEAD = re.compile(r"\.(entry|func)\s+([\w$]+)\s*\(([^)]*)\)\s*(?=([;{.]))")
_CALL = re.compile(r"\bcall(?:\.uni)?\s+([\w$]+)\s*,\s*\([^)]*\)\s*;")
_GIVEN = re.compile(r"\bst\.param\.b(\d+)\s+\[param(\d+)(?:\+0)?\]\s*,")
_TAKEN = re.compile(r"\bld\.param\.([bsu])(\d+)\s+([^,]+),\s*\[[\w$]+_param_(\d+)\]")
#: First number of the registers of an inlined function; its arguments are numbered from the middle.
_APART = 100_000


def only_kernel(text: str) -> tuple[str, str]:
    """(parameters, body with all calls inlined) of the module's kernel. ValueError for calls of unknown functions or
    with results."""
    functions, declared, body = {}, "", ""
    for head in _HEAD.finditer(text):
        kind, name, parameters, follows = head.groups()
        if kind == "entry":
            declared, body = parameters, _body(text, head.end())
        elif follows == "{":  # a definition, not a declaration
            functions[name] = _body(text, head.end())
    for number in range(1, len(text)):
        call = _CALL.search(body)
        if call is None:
            break
        before, after = body[: call.start()], body[call.end() :]
        before = _GIVEN.sub(lambda m, n=number: f"mov.b{m[1]} {_argument(n, m[1], m[2])},", before)
        if call[1] not in functions:
            break
        body = before + _in_place(functions[call[1]], number) + after
    if match := re.search(r"\bcall\b[^;]*", body):
        raise ValueError(f"not a call of a function that returns nothing: {match[0][:80]!r}")
    return declared, body


def _body(text: str, start: int) -> str:
    """Text between the next opening brace and its closing brace."""
    depth, first = 0, text.index("{", start)
    for brace in re.finditer(r"[{}]", text[first:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[first + 1 : first + brace.start()]
    raise ValueError("a brace is not closed")


def _in_place(body: str, number: int) -> str:
    """Body of a function for call `number`, with registers and labels of its own."""
    body = _TAKEN.sub(_taken, body)
    body = re.sub(r"(%(?:p|rs|rd|r|f|fd|rh))(\d+)\b", lambda m: f"{m[1]}{number * _APART + int(m[2])}", body)
    body = re.sub(r"(\$L_\w+)", rf"\1_call_{number}", body)
    return re.sub(r"\bret\b", f"bra $returned_{number}", body) + f"\n$returned_{number}:\n"


def _taken(load: re.Match[str]) -> str:
    """Copy of an argument instead of its load, which may extend it to 64 bits."""
    kind, bits, register, place = load.groups()
    argument = _argument(0, bits, place)
    if kind != "b" and bits != "64" and register.startswith("%rd"):
        return f"cvt.{kind}64.{kind}{bits} {register}, {argument}"
    return f"mov.b{bits} {register}, {argument}"


def _argument(number: int, bits: str, place: str) -> str:
    """Register that holds an argument of call `number`."""
    letters = {"16": "rs", "32": "r", "64": "rd"}[bits]
    return f"%{letters}{number * _APART + _APART // 2 + int(place)}"
