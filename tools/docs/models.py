"""Write docs/MODELS.md: which model families kvq computes exactly, and which it refuses.

python tools/docs/models.py [FOLDER]    into FOLDER instead of docs/
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers
from model_matrix import FAMILIES, REFUSED, Row, examine, refusal

from kvq_cli.evaluation.formats import markdown
from kvq_cli.methods.registry import method_names

PAGE = Path(__file__).parents[2] / "docs" / "MODELS.md"
HEAD = """\
# Models

Made by `make docs`, and checked by `tests/attention/test_model_families.py`; do not edit. Each row is a small random
model of a family of transformers (its `model_type`), with the options that are special about it. *Exact*: caches that
keep keys after RoPE, keys before RoPE, or the layer input, in full precision, give the model's own logits within
float32 rounding, for a prompt, a chunk and single tokens. *Methods*: those that decode it at 2 bits. Other families
often work, too: kvq compares what it captures with what the model caches, and refuses a model where these differ.
`kvq serve` also refuses families with sliding windows ([SERVING.md](SERVING.md)).
"""
REFUSED_HEAD = """\
## Refused

`kvq` refuses these families in one line.
"""


def main() -> None:
    target = Path(sys.argv[1]) / PAGE.name if len(sys.argv) > 1 else PAGE
    target.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the text of docs/MODELS.md."""
    rows = [cells(examine(name)) for name in FAMILIES]
    refused = [[f"`{name}`", refusal(name)] for name in REFUSED]
    parts = [HEAD, markdown(["model_type", "attention", "exact", "methods"], rows)]
    return "\n".join([*parts, "", REFUSED_HEAD, markdown(["model_type", "why"], refused)]) + "\n"


def cells(row: Row) -> list[str]:
    """A family's cells in the table."""
    why = {reason.split(": ", 1)[-1] for name, reason in row.refused.items()}
    exact = "all three" if len(row.errors) == 3 else ", ".join(row.errors)
    methods = [name for name in method_names() if name in row.refused]
    missing = f"all but {', '.join(methods)} ({'; '.join(sorted(why))})" if methods else "all"
    return [f"`{row.model_type}`", row.features, exact, missing]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
