"""Commands that compute nothing, and errors in the names and options of all, come without importing PyTorch."""

import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results/reproduction/smollm2/compare-2bit"

#: Arguments, and a part of what the command prints.
ANSWERS = [
    (["methods", "kivi"], "numbers that share a scale"),
    (["methods", "nosuch"], "unknown method 'nosuch'"),
    (["results", str(RESULTS), "--format", "csv"], "klt-2bit"),
    (["generate", "--method", "kivi", "--bits", "77", "hi"], "bits=77 is not one of"),
    (["chat", "--method", "kivi", "--set", "foo=1"], "has no option 'foo'"),
    (["eval", "--task", "nosuch"], "unknown task 'nosuch'"),
    (["eval", "--compare", "kivi,kivvi"], "unknown method 'kivvi'"),
    (["calibrate", "--method", "kivi"], "needs no calibration"),
    (["bits", "--method", "nosuch"], "unknown method 'nosuch'"),
    (["plan", "--gpu", "nosuch"], "unknown GPU 'nosuch'"),
    (["inspect", "nosuch"], "no artifact at nosuch"),
    (["tune", "--budget", "99"], "--budget 99 must be above 0"),
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
