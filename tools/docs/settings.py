"""Write docs/SETTINGS.md, the options of each method and what they are worth on SmolLM2, and
kvq_cli/methods/recommended.json, the settings that `kvq methods NAME` prints.

python tools/docs/settings.py [FOLDER]    both into FOLDER instead
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvq_cli.evaluation.formats import markdown
from kvq_cli.evaluation.paired import interval
from kvq_cli.files import write_text
from kvq_cli.methods.recommended import FILE, Recommendation
from kvq_cli.papers.page import NAMES
from kvq_cli.papers.settings import CHANCE, LONG, AtEqualBits, Effect, Measured, Sweep, load_sweep
from kvq_cli.papers.targets import SMOLLM2, Target, targets

ROOT = Path(__file__).parents[2]
HEAD = """\
# Settings

Made by `make docs` from results/reproduction/smollm2/settings-*; do not edit. Each table changes single options of a
method at 2 bits, on {model}: {windows} windows of {tokens:,} tokens from three texts (Wikipedia, GSM8K, the Bible).
The second half of each window is scored after the first. The defaults stay those of the papers; `kvq methods NAME`
lists the settings that are better.

- *bits* are measured per cached number, with scales, outliers and exact windows; *at {long:,}* are those that
  `kvq bits` counts for a context of {long:,} tokens, where exact windows are a small part. Cells of texts are
  perplexity and KL divergence to the uncompressed model, in nats per token; *KL* is the mean over all windows.
- *difference* is that of KL to the default, window by window, with its 95 % confidence interval (Student's t).
- *at equal bits* is KL beside the default's, as the geometric mean of the windows' ratios, less 100 %, with its
  interval. A setting with more bits, or with fewer bits and a higher KL, is compared with the defaults at its own bits
  instead: in each window, on the line through the defaults at two numbers of bits, in the logarithm of KL.
  *at {long:,}* does the same with the bits of the long context.
- A verdict needs an interval without zero. **better**: lower KL with no more bits, or lower than the defaults would
  have with as many; then the interval of the difference has to exclude zero, too. *saves bits*: a higher KL, but lower
  than the defaults would have with as few. *worse*: higher. Exact windows cost many bits in a short context and few
  in a long one: some settings are better in long contexts alone, if KL differs there as it does here.
- {comparisons} settings were compared. Of as many without any effect, 95 % intervals would show about {chance:.0f} as
  better by chance. A gain here says little about other models and bits, and nothing about several changes together.
"""


def main() -> None:
    page, package = ROOT / "docs", ROOT / "kvq_cli" / "methods"
    if len(sys.argv) > 1:
        page = package = Path(sys.argv[1]).resolve()
    os.chdir(ROOT)  # targets name result folders relative to the repository
    swept = [(each, load_sweep(each, SMOLLM2)) for each in targets().values() if each.sweep]
    sweeps = [each for _, each in swept if each is not None]
    write_text(page / "SETTINGS.md", page_text(swept, sweeps))
    recommended: dict[str, list[dict[str, Any]]] = {each.method: [] for each in sweeps}
    for each in sweeps:
        recommended[each.method] += [asdict(recommendation(effect, each)) for effect in each.better()]
    write_text(package / FILE, json.dumps(recommended, indent=1, ensure_ascii=False) + "\n")


def recommendation(effect: Effect, sweep: Sweep) -> Recommendation:
    """A setting that is better beyond chance, with rounded numbers."""
    kl, low, high = effect.judged.relative
    return Recommendation(
        effect.measured.change,
        round(kl, 4),
        round(low, 4),
        round(high, 4),
        bits=round(effect.short.more, 3),
        long_bits=round(effect.long.more, 3),
        long_only=effect.long_only,
        model=NAMES[SMOLLM2],
        windows=len(sweep.default.kl),
        tokens=sweep.tokens,
        long=LONG,
    )


def page_text(swept: list[tuple[Target, Sweep | None]], sweeps: list[Sweep]) -> str:
    """Return the page as Markdown."""
    comparisons = sum(len(each.effects) for each in sweeps)
    first = sweeps[0]
    head = HEAD.format(
        model=NAMES[SMOLLM2],
        windows=len(first.default.kl),
        tokens=first.tokens,
        long=LONG,
        comparisons=comparisons,
        chance=comparisons * 0.025,
    )
    return "\n\n".join([head.rstrip(), *(section(target, sweep) for target, sweep in swept)]) + "\n"


def section(target: Target, sweep: Sweep | None) -> str:
    """The commands, the conclusion and the table of one method."""
    command = shlex.join(["kvq", "reproduce", target.id, "--model", SMOLLM2])
    title = f"## {target.what[0].upper()}{target.what[1:]}"
    commands = f"<!-- not run: takes minutes to hours -->\n```bash\n{command}\nmake docs\n```"
    if sweep is None:
        return "\n\n".join([title, commands, "Not measured yet."])
    parts = [title, conclusion(sweep), commands, table(sweep)]
    if sweep.missing:
        parts.append("Not measured yet: " + _listed(sweep.missing) + ".")
    return "\n\n".join(parts)


def conclusion(sweep: Sweep) -> str:
    """What to set, what it is worth, and at what cost in bits; then what makes no difference, and what is worse."""
    sentences = []
    always = [each for each in sweep.better() if not each.long_only]
    longer = [each for each in sweep.better() if each.long_only]
    if always:
        sentences.append(f"Set {_gain(always[0], sweep)}.")
    elif longer:
        sentences.append(f"In long contexts set {_gain(longer.pop(0), sweep)}.")
    else:
        sentences.append("Keep the defaults: no setting below is better beyond chance at equal bits.")
    for effects, text in ((always[1:], "Better by itself, too"), (longer, "Better in long contexts")):
        if effects:
            sentences.append(f"{text}: {'; '.join(_gain(each, sweep) for each in effects)}.")
    others = [each for each in sweep.effects if not each.better]
    for verdict in sorted({each.verdict for each in others}):
        text = "no difference beyond chance" if verdict == CHANCE else verdict
        settings = _listed([each.measured.change for each in others if each.verdict == verdict])
        sentences.append(f"{text[0].upper()}{text[1:]}: {settings}.")
    return " ".join(sentences)


def _gain(effect: Effect, sweep: Sweep) -> str:
    return f"`{effect.measured.change}`: KL {_percent(effect.judged)} ({recommendation(effect, sweep).cost})"


def table(sweep: Sweep) -> str:
    """A row per setting, the default first."""
    texts = list(sweep.default.texts)
    columns = ["setting", "bits", f"at {LONG:,}", *texts, "perplexity", "KL", "difference", "at equal bits"]
    rows = [[*_cells(each, texts), "", "", "", ""] for each in sweep.defaults]
    rows[0][0] += " (default)"
    for each in sweep.effects:
        verdict = f"**{each.verdict}**" if each.better else each.verdict
        compared = [interval(each.difference), _percent(each.short), _percent(each.long), verdict]
        rows.append([*_cells(each.measured, texts), *compared])
    return markdown([*columns, f"at {LONG:,}", "verdict"], rows)


def _cells(row: Measured, texts: list[str]) -> list[str]:
    scores = [f"{row.texts[text][0]:.2f}, {row.texts[text][1]:.3f}" for text in texts]
    bits = [f"{row.bits:.2f}", f"{row.long_bits:.2f}"]
    return [f"`{row.change}`", *bits, *scores, f"{row.perplexity:.2f}", f"{row.mean_kl:.4f}"]


def _percent(compared: AtEqualBits) -> str:
    mean, low, high = (f"{100 * value:+.1f}" for value in compared.relative)
    return f"{mean} % [{low}, {high}]"


def _listed(settings: Sequence[str]) -> str:
    return ", ".join(f"`{each}`" for each in settings)


if __name__ == "__main__":
    main()
