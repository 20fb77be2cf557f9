"""Draw docs/decode-step.svg: the calls of one decode step from subpackage to subpackage, recorded while it runs.

    python -m lab.pages.decode_step [FOLDER]    into FOLDER instead of docs/

KIVI decodes one token on the built-in model, at a length at which keys and values are packed, on the way that it takes
on a GPU, except that PyTorch packs. Kernels are launched but not executed: what they would write is zero. Calls that
run no operation of PyTorch are left out.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

# Without a GPU, the Triton backend needs this when Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from kvq_cli import attach, build
from kvq_cli.cache_argument import cache_argument
from kvq_cli.models import load_model
from lab.pages.drawing import Drawing, shorten

PICTURE = Path(__file__).parents[2] / "docs" / "decode-step.svg"
RESIDUAL = 32
MODEL, KERNELS = "model", "kvq_kernels"
#: The columns from left to right, and the package of each.
ROOMS = {MODEL: "transformers", "attention": "kvq_cli", "cache": "kvq_cli", "codecs": "kvq_cli", KERNELS: ""}

MARGIN, HEAD, ROW = 30, 124, 40
COLUMN, TEXT, INDENT = 150, 640, 14  # widths: of a subpackage's column, of the explanations, of their steps
BAR, SHIFT = 10, 7  # width of a call's bar, and how far that of a call inside of it is to the right
FILLS = {MODEL: "#eef0f2", KERNELS: "#fdf0dd"}


@dataclass(eq=False)
class Call:
    """A function that ran in a subpackage, its number of calls, and its calls to other subpackages."""

    room: str
    name: str
    about: str
    count: int = 1
    touches: bool = False
    calls: list[Call] = field(default_factory=list)


def main() -> None:
    target = Path(sys.argv[1]) / PICTURE.name if len(sys.argv) > 1 else PICTURE
    target.write_text(picture(), encoding="utf-8")


def record() -> Call:
    """Return the calls of one decode step."""
    transformers.utils.logging.disable_progress_bar()
    model = load_model("reference", "cpu", "float32").model
    ids = torch.arange(2 * RESIDUAL) % model.config.vocab_size
    interpreter.GridExecutor.__call__ = lambda *_arguments, **_options: None
    method = build("kivi", bits=2, residual=RESIDUAL)
    with torch.no_grad(), attach(model, method, backend="triton") as kv, _Recorder() as recorder:
        passed = cache_argument(kv.new_cache(ids.numel()))
        model(ids[None, :-1], **passed)
        sys.setprofile(recorder.profile)
        model(ids[None, -1:], **passed)
        sys.setprofile(None)
    return next(call for call in recorder.root.calls if call.room == MODEL)


class _Recorder(TorchDispatchMode):
    """Records calls between subpackages and which of them run PyTorch operations; new memory is zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Call("", "", "")
        self._stack: list[Call] = [self.root]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for call in self._stack:
            call.touches = True
        result = operation(*args, **(kwargs or {}))
        return result.zero_() if "empty" in operation.__name__ else result

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            inside, room, name = self._stack[-1], _room(frame), frame.f_code.co_qualname
            private = re.search(r"(^|\.)_", name)
            hidden = room is None or "<" in name or (room == inside.room and private)
            self._stack.append(inside if hidden else self._enter(inside, room, name, frame))
        elif event == "return" and len(self._stack) > 1:
            self._stack.pop()

    def _enter(self, caller: Call, room: str, name: str, frame: FrameType) -> Call:
        for call in caller.calls:
            if (call.room, call.name) == (room, name):
                call.count += 1
                return call
        caller.calls.append(Call(room, name, _about(frame)))
        return caller.calls[-1]


def _room(frame: FrameType) -> str | None:
    """Return the subpackage of a frame's function; None if it is not drawn."""
    module = frame.f_globals.get("__name__", "")
    if module.startswith("transformers.models."):
        return MODEL
    package, _, rest = module.partition(".")
    room = package if package == KERNELS else rest.split(".")[0]
    return room if package in ("kvq_cli", KERNELS) and room in ROOMS else None


def _about(frame: FrameType) -> str:
    """Return the first sentence of the function's docstring; an empty string for the model's functions."""
    code = frame.f_code
    if _room(frame) == MODEL:
        return ""
    owner = type(frame.f_locals["self"]) if "self" in frame.f_locals else None
    function = getattr(owner, code.co_name, None) or frame.f_globals.get(code.co_name)
    text = (inspect.getdoc(function) or "").split("\n\n")[0]
    return re.split(r"(?<=[.;:]) ", " ".join(text.split()))[0].rstrip(".;:")


def picture() -> str:
    """Return the text of docs/decode-step.svg."""
    rows = list(_rows(record(), ()))
    width = 2 * MARGIN + COLUMN * len(ROOMS) + TEXT
    drawing = Drawing(width, HEAD + ROW * len(rows) + MARGIN, "One decode step of kvq")
    drawing.text(MARGIN, 36, "One decode step with KIVI, from the model to the kernel and back", 20, "bold")
    about = "recorded while it ran, top to bottom; ×8: once in each of the 8 layers; ×16: for keys and for values"
    drawing.text(MARGIN, 58, about, 13, "grey")
    middles = {room: MARGIN + COLUMN * (i + 0.5) for i, room in enumerate(ROOMS)}
    bottom = HEAD + ROW * len(rows)
    for room, x in middles.items():
        drawing.box(x - COLUMN / 2 + 8, 74, COLUMN - 16, 40, FILLS.get(room, "#e8f1fb"))
        drawing.text(x, 92, room, 14, "bold code", "middle")
        drawing.text(x, 107, ROOMS[room], 11, "grey code", "middle")
        drawing.line(x, 114, x, bottom, "#c3cad2", "3 4")
    shifts = [SHIFT * sum(outer.room == call.room for outer in callers) for callers, call in rows]
    for i, (_callers, call) in enumerate(rows):  # bars first: the arrows end on them
        last = i
        while last + 1 < len(rows) and call in rows[last + 1][0]:
            last += 1
        x, y = middles[call.room] + shifts[i] - BAR / 2, HEAD + ROW * (i + 0.5) - 9
        drawing.box(x, y, BAR, ROW * (last - i) + 18, FILLS.get(call.room, "#bcd7f2"), radius=2)
    for i, (callers, call) in enumerate(rows):
        y, x = HEAD + ROW * (i + 0.5), middles[call.room] + shifts[i]
        if callers and callers[-1].room != call.room:
            start = max(j for j in range(i) if rows[j][1] is callers[-1])
            drawing.arrow(f"M{middles[callers[-1].room] + shifts[start] + BAR / 2:.1f},{y:.1f} H{x - BAR / 2 - 1:.1f}")
        x = MARGIN + COLUMN * len(ROOMS) + 8 + INDENT * len(callers)
        up = 3 if call.about else -5
        drawing.text(x, y - up, call.name + (f"  ×{call.count}" if call.count > 1 else ""), 13, "bold code")
        drawing.text(x, y + 13, shorten(call.about, width - MARGIN - x, 12), 12, "grey")
    return drawing.svg()


def _rows(call: Call, callers: tuple[Call, ...]) -> Iterator[tuple[tuple[Call, ...], Call]]:
    """Yield each call that touches a tensor with its chain of callers, in the order of first calls."""
    yield callers, call
    for inner in call.calls:
        if inner.touches:
            yield from _rows(inner, (*callers, call))


if __name__ == "__main__":
    main()
