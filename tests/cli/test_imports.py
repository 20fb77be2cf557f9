"""Commands that compute nothing, and errors in the names and options of all, come without importing PyTorch."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS, ARTIFACT = ROOT / "results/reproduction/smollm2/compare-2bit", ROOT / "artifacts/reference/temporalkv-2bit"

#: Arguments, and a part of what the command prints.
ANSWERS = [
    (["methods"], "klt"),
    (["methods", "kivi"], "numbers that share a scale"),
    (["bits", "--shapes", "llama-3.1-8b"], "temporalkv-2bit"),
    (["plan", "--gpu", "h100"], "longest context"),
    (["inspect", str(ARTIFACT)], "llama, 8 layers"),
    (["methods", "nosuch"], "unknown method 'nosuch'"),
    (["results", str(RESULTS), "--format", "csv"], "klt-2bit"),
    (["generate", "--method", "kivi", "--bits", "77", "hi"], "bits=77 is not one of"),
    (["chat", "--method", "kivi", "--set", "foo=1"], "has no option 'foo'"),
    (["eval", "--task", "nosuch"], "unknown task 'nosuch'"),
    (["eval", "--compare", "kivi,kivvi"], "unknown method 'kivvi'"),
    (["calibrate", "--method", "kivi"], "needs no calibration"),
    (["bits", "--method", "nosuch"], "unknown method 'nosuch'"),
    (["serve", "--method", "nosuch"], "unknown method 'nosuch'"),
    (["plan", "--gpu", "nosuch"], "unknown GPU 'nosuch'"),
    (["inspect", "nosuch"], "no artifact at nosuch"),
    (["eval", "--dataset", "nosuch"], "no dataset 'nosuch'"),
    (["calibrate", "--method", "temporalkv", "--dataset", "nosuch"], "no dataset 'nosuch'"),
    (["bench", "generate", "--random", "nosuch"], "--random nosuch: unknown shape"),
    (["bench", "generate", "--compare", "nosuch"], "unknown method 'nosuch'"),
    (["bench", "calibrate", "--method", "nosuch"], "unknown method 'nosuch'"),
    (["reproduce", "nosuch"], "nosuch"),
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
print("imported vLLM's room:", any(name.startswith("kvq_cli.vllm") for name in sys.modules))
"""


def test_answers_come_without_pytorch():
    commands = [words for words, _ in ANSWERS]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(commands=commands)], capture_output=True, text=True, check=True
    )
    assert run.stdout.count("imported PyTorch: False") == len(ANSWERS), run.stdout
    assert "imported vLLM's room: False" in run.stdout
    for _, said in ANSWERS:
        assert said in run.stdout + run.stderr
