"""Commands that compute nothing answer without importing PyTorch."""

import subprocess
import sys

#: Arguments, and a part of what the command prints.
ANSWERS = [
    (["methods", "kivi"], "numbers that share a scale"),
    (["methods", "nosuch"], "unknown method 'nosuch'"),
]
SCRIPT = """
import sys
from kvq_cli.cli.app import app
for words in {commands}:
    try:
        app(words)
    except SystemExit:
        pass
    print("imported PyTorch:", "torch" in sys.modules)
"""


def test_answers_come_without_pytorch():
    commands = [words for words, _ in ANSWERS]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(commands=commands)], capture_output=True, text=True, check=True
    )
    assert run.stdout.count("imported PyTorch: False") == len(ANSWERS), run.stdout
    for _, said in ANSWERS:
        assert said in run.stdout + run.stderr
