"""Tables of commands on terminals of 100 and 80 columns: as columns, no line too long, no word broken."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvq_cli.cli.output import Output

COMMANDS = [
    "methods",
    "methods innerq",
    "methods xquant-cl",
    "bits --shapes llama-3.1-8b --context 131072",
    "bits --papers",
    "plan --shapes llama-3.1-8b --gpu h100 --context 131072 --batch 8",
]


@pytest.mark.parametrize("width", [100, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_tables_fit_terminals(kvq, monkeypatch, command, width):
    in_a_pipe = kvq(*command.split()).stdout

    def console(self: Output, *, stderr: bool = True) -> Console:
        return Console(file=self._stdout, width=width, force_terminal=True, color_system=None, highlight=False)

    monkeypatch.setattr(Output, "console", console)
    printed = kvq(*command.split()).stdout
    assert max(map(len, printed.splitlines())) <= width
    words = set(in_a_pipe.replace("\u2500", "").split())
    assert words <= set(printed.split())
    assert "\u2500" * (width // 3) in printed  # a table with a line below its heads, not records
