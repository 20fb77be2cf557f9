"""Calls of a module's functions, put in the place of the call: what is executed has none."""

from __future__ import annotations

import re

_HEAD = re.compile(r"\.(entry|func)\s+([\w$]+)\s*\(([^)]*)\)\s*(?=([;{.]))")
_CALL = re.compile(r"\bcall(?:\.uni)?\s+([\w$]+)\s*,\s*\([^)]*\)\s*;")
_GIVEN = re.compile(r"\bst\.param\.b(\d+)\s+\[param(\d+)(?:\+0)?\]\s*,")
_TAKEN = re.compile(r"\bld\.param\.b(\d+)\s+([^,]+),\s*\[[\w$]+_param_(\d+)\]")
#: Registers of a function that is called are numbered from here on, and its arguments from the middle.
_APART = 100_000


def only_kernel(text: str) -> tuple[str, str]:
    """(how the module's one kernel is declared, its body with all functions in their place). ValueError for a call of
    what is not in the module, or returns something."""
    functions, declared, body = {}, "", ""
    for head in _HEAD.finditer(text):
        kind, name, parameters, follows = head.groups()
        if kind == "entry":
            declared, body = parameters, _body(text, head.end())
        elif follows == "{":  # and not its declaration ahead of it
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
    """What the braces hold that open next."""
    depth, first = 0, text.index("{", start)
    for brace in re.finditer(r"[{}]", text[first:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[first + 1 : first + brace.start()]
    raise ValueError("a brace is not closed")


def _in_place(body: str, number: int) -> str:
    """A function's body as part of what calls it, in the `number`-th call."""
    body = _TAKEN.sub(lambda m: f"mov.b{m[1]} {m[2]}, {_argument(0, m[1], m[3])}", body)
    body = re.sub(r"(%(?:p|rs|rd|r|f|fd|rh))(\d+)\b", lambda m: f"{m[1]}{number * _APART + int(m[2])}", body)
    body = re.sub(r"(\$L_\w+)", rf"\1_call_{number}", body)
    return re.sub(r"\bret\b", f"bra $returned_{number}", body) + f"\n$returned_{number}:\n"


def _argument(number: int, bits: str, place: str) -> str:
    """The register that holds an argument of the `number`-th call."""
    letters = {"16": "rs", "32": "r", "64": "rd"}[bits]
    return f"%{letters}{number * _APART + _APART // 2 + int(place)}"
