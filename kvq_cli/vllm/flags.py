"""The words of vLLM's command line, read as vLLM reads them."""

from __future__ import annotations

from collections.abc import Sequence

#: Short forms of flags that kvq reads.
_ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
}
#: Flags whose values nobody else may see.
_SECRET = ("--api-key", "--hf-token")


def flag_name(word: str) -> str:
    """The flag of `--flag`, `--flag=value`, `--flag_with_underscores` or a short form, as vLLM takes them."""
    name = word.partition("=")[0]
    return _ALIASES.get(name, name.replace("_", "-") if name.startswith("--") else name)


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The value of a flag in `--flag value` or `--flag=value`, or of its short form: the last, if it is given several
    times. None: it is not given."""
    for i, word in reversed(list(enumerate(flags))):
        _, equals, value = word.partition("=")
        if flag_name(word) == name and (equals or i + 1 < len(flags)):
            return value if equals else flags[i + 1]
    return None


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """The flags but for these and their values."""
    kept, skip = [], False
    for word in flags:
        if skip:
            skip = False
        elif flag_name(word) not in names:
            kept.append(word)
        else:
            skip = "=" not in word
    return kept


def masked(words: Sequence[str]) -> list[str]:
    """The words with `***` in place of keys and tokens, also where vLLM takes several or the start of a flag's name."""
    shown, secret = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            secret = len(name) > 2 and any(flag.startswith(flag_name(word)) for flag in _SECRET)
            shown.append(f"{name}=***" if secret and equals else word)
        else:
            shown.append("***" if secret else word)
    return shown
