"""Write docs/SETTINGS.md, the options of each method and what they are worth on SmolLM2, and
kvq_cli/methods/recommended.json, the settings that `kvq methods NAME` prints.

python tools/docs/settings.py [FOLDER]    both into FOLDER instead
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import torch

from kvq_cli.benchmarking.accounting import account
from kvq_cli.evaluation.formats import markdown
from kvq_cli.evaluation.paired import interval
from kvq_cli.files import write_text
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.recommended import FILE, Recommendation
from kvq_cli.methods.registry import from_config
from kvq_cli.papers.page import NAMES
from kvq_cli.papers.settings import BETTER, CHANCE, UNKNOWN, WORSE, Effect, Measured, Sweep, load_sweep
from kvq_cli.papers.targets import SMOLLM2, Target, targets

ROOT = Path(__file__).parents[2]
#: A length at which sinks and recent tokens are a small part of the cache.
LONG = 32768
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
- *at equal bits* compares with the defaults at the row's own measured bits: in each window, KL between the defaults of
  the table at two numbers of bits, linear in the logarithm; in percent of that KL, with its interval. A setting is
  **better** or **worse** if this interval excludes zero. Below or above the bits of all defaults there is no such KL:
  there a setting is better if it has no more bits than the default and the interval of the difference is below zero,
  worse if it has more and the interval is above zero.
- {comparisons} settings were compared. Of as many without any effect, 95 % intervals would show about {chance:.0f} as
  better and as many as worse. A gain here says little about other lengths, models or bits.
"""


def main() -> None:
    page, package = ROOT / "docs", ROOT / "kvq_cli" / "methods"
    if len(sys.argv) > 1:
        page = package = Path(sys.argv[1]).resolve()
    os.chdir(ROOT)  # targets name result folders relative to the repository
    swept = [(each, load_sweep(each, SMOLLM2)) for each in targets().values() if each.sweep]
    sweeps = [each for _, each in swept if each is not None]
    write_text(page / "SETTINGS.md", page_text(swept, sweeps))
    recommended = {each.method: [vars(entry) for entry in recommendations(each)] for each in sweeps}
    write_text(package / FILE, json.dumps(recommended, indent=1, ensure_ascii=False) + "\n")


def recommendations(sweep: Sweep) -> list[Recommendation]:
    """The settings of a method that are better beyond chance, with rounded numbers."""
    found = []
    for each in sweep.better():
        kl, low, high = (round(value, 4) for value in each.relative)
        bits = round(each.measured.bits, 3), round(sweep.default.bits, 3)
        windows = len(sweep.default.kl)
        found.append(Recommendation(each.measured.change, kl, low, high, *bits, NAMES[SMOLLM2], windows, sweep.tokens))
    return found


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
    title = f"## {target.sweep['method']}" if target.sweep else ""
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
    better = sweep.better()
    if better:
        sentences.append(f"Set {_gain(better[0], sweep)}.")
    else:
        sentences.append("Keep the defaults: no setting below is better beyond chance at equal bits.")
    if better[1:]:
        sentences.append(f"Also better, by themselves: {'; '.join(_gain(each, sweep) for each in better[1:])}.")
    for verdict, text in ((WORSE, "Worse"), (CHANCE, "No difference beyond chance"), (UNKNOWN, "Not comparable")):
        if found := [each.measured.change for each in sweep.effects if each.verdict == verdict]:
            sentences.append(f"{text}: {_listed(found)}.")
    return " ".join(sentences)


def _gain(effect: Effect, sweep: Sweep) -> str:
    short = effect.measured.bits - sweep.default.bits
    long = long_bits(effect.measured, sweep) - long_bits(sweep.default, sweep)
    costs = f"{short:+.2f} bits here, {long:+.2f} at {LONG:,} tokens"
    return f"`{effect.measured.change}`: KL {_percent(effect)} at equal bits ({costs})"


def table(sweep: Sweep) -> str:
    """A row per setting, the default first."""
    texts = list(sweep.default.texts)
    columns = ["setting", "bits", f"at {LONG:,}", *texts, "perplexity", "KL", "difference", "at equal bits", ""]
    rows = [[*_cells(each, sweep, texts), "", "", ""] for each in sweep.defaults]
    rows[0][0] += " (default)"
    for each in sweep.effects:
        shown = each.verdict if each.verdict in (BETTER, WORSE) else ""
        equal = "" if each.verdict == UNKNOWN else _percent(each)
        rows.append(
            [*_cells(each.measured, sweep, texts), interval(each.difference), equal, f"**{shown}**" if shown else ""]
        )
    return markdown(columns, rows)


def _cells(row: Measured, sweep: Sweep, texts: list[str]) -> list[str]:
    scores = [f"{row.texts[text][0]:.2f}, {row.texts[text][1]:.3f}" for text in texts]
    long = f"{long_bits(row, sweep):.2f}"
    return [f"`{row.change}`", f"{row.bits:.2f}", long, *scores, f"{row.perplexity:.2f}", f"{row.mean_kl:.4f}"]


def long_bits(row: Measured, sweep: Sweep) -> float:
    """Measured bits per cached number at a context of LONG tokens, for the sweep's model."""
    sizes = {key: sweep.shape[key] for key in ("layers", "query_heads", "kv_heads", "head_dim", "hidden_size")}
    return account(from_config(row.method), ModelShape(**sizes, dtype=torch.float16), LONG).measured_bits


def _percent(effect: Effect) -> str:
    mean, low, high = (f"{100 * value:+.1f}" for value in effect.relative)
    return f"{mean} % [{low}, {high}]"


def _listed(settings: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{each}`" for each in settings)


if __name__ == "__main__":
    main()
