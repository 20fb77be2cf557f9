"""Speculative decoding: which drafts kvq serves, and how vLLM's command line asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from kvq_cli.errors import UsageError
from kvq_cli.files import load_json
from kvq_cli.vllm.flags import flag_name, flag_value

FLAG = "--speculative-config"
#: vLLM's methods that draft without a model, whose layers would have caches, too.
DRAFTS = ("ngram", "ngram_gpu", "suffix", "custom_class")


def check_drafts(method: str, stores: bool = False) -> None:
    """Raise UsageError unless kvq serves with drafts of this method of vLLM. stores: prefixes are stored on disk."""
    if method not in DRAFTS:
        raise UsageError(
            f"{FLAG}: kvq does not serve with method {method}: vLLM gives all layers pages of one size, and those of "
            f"the draft model's uncompressed layers would undo the compression; use {', '.join(DRAFTS)}"
        )
    if stores:
        raise UsageError(f"{FLAG}: --prefix-store does not support speculative decoding; remove one of them")


def method_of_flags(flags: Sequence[str]) -> str | None:
    """Return the method of speculative decoding that vLLM's flags ask for; None: they ask for none. vLLM takes a
    JSON object, a flag for each field, and short forms of some. Raises UsageError for two methods."""
    fields: dict[str, str] = {}
    for i, word in enumerate(flags):
        start, _, field = word.partition("=")[0].partition(".")
        if field and flag_name(start) == FLAG:
            _, equals, value = word.partition("=")
            fields[field] = value if equals else next(iter(flags[i + 1 : i + 2]), "")
    text = flag_value(flags, FLAG)
    if text is not None:
        given, dotted = _object(text), fields.get("method")
        if dotted is not None and given.get("method", dotted) != dotted:
            raise UsageError(f"{FLAG}: names method {given['method']}, and {FLAG}.method {dotted}; give one of them")
        fields |= given
    for field in ("method", "model", "tokens"):
        if (short := flag_value(flags, f"--spec-{field}")) is not None:
            fields[field] = short
    if not fields:
        return None
    model = fields.get("model")
    return fields.get("method") or ("ngram" if model in ("ngram", "[ngram]") else "draft_model")


def _object(text: str) -> dict[str, str]:
    try:
        given = load_json(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UsageError(f'{FLAG} {text}: must be a JSON object, such as {{"method": "ngram"}}')
    return given
