"""The texts and tasks that a target is measured on, in words: they stand for the papers'."""

from __future__ import annotations

from pathlib import Path

from kvq_cli.evaluation.base import PERPLEXITY
from kvq_cli.papers.inputs import command_options
from kvq_cli.papers.targets import Target


def measured_on(target: Target, model: str) -> str:
    """What is scored, such as `wikitext2, gsm8k: 3 windows of 1,024 tokens each`, or the text that a study reads.

    Empty if the target reads no text. What its command leaves open is not named.
    """
    if not (target.eval or target.analyze):
        return ""
    options = {name: values[-1] for name, values in command_options(target.command(model)).items()}
    texts = ", ".join(Path(name.strip()).name.partition(".")[0] for name in options.get("dataset", "prose").split(","))
    if target.analyze:
        return texts
    tasks = [name.strip() for name in options.get("task", "").split(",")]
    answered = ", ".join(name for name in tasks if name != PERPLEXITY)
    parts = [_scored(answered, "answers", options.get("samples"), options.get("seqlen"))] if answered else []
    if PERPLEXITY in tasks:
        parts.append(_scored(texts, "windows", options.get("samples"), options.get("seqlen")))
    return "; ".join(parts)


def _scored(names: str, what: str, count: str | None, tokens: str | None) -> str:
    counted = f"{count} {what}{' each' * (', ' in names)}" if count else ""
    return ": ".join(filter(None, (names, ", ".join(filter(None, (counted, f"{tokens} tokens" * bool(tokens)))))))
