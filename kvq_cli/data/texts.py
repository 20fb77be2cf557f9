"""Text by name, and the token windows that calibration and perplexity cut from it.

Names: the hub's `wikitext2`, `c4` and `ptb`; the built-in `prose` and `pydoc`, which are always there offline; or a
file. Each has two splits, `calibration` and `evaluation`, that share no text (a file is the same text in both).
The dataset `self` is text sampled from the model: it comes as tokens, from `self_windows`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import lzma
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import LongTensor

from kvq_cli import reference
from kvq_cli.errors import KvqError, UsageError

SELF = "self"
SPLITS = reference.SPLITS
OFFLINE = "prose, pydoc, self, or a .txt, .jsonl or .parquet file"
# A vocabulary seldom spends more tokens than one for two characters or packs more than eight into one: reading this
# much of a long text is enough to cut the windows from.
_CHARACTERS_PER_TOKEN = 8


def load_text(name: str, split: str) -> str:
    """The text of one dataset as one string.

    Raises UsageError for a name that is neither a dataset nor a file, KvqError where it cannot be read or reached.
    """
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}: {' or '.join(SPLITS)}")
    if name in _BUILT_IN:
        return _BUILT_IN[name](split)
    if name in _HUB:
        return _from_hub(name, split)
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"no dataset {name!r}: neither a file nor one of {', '.join(dataset_names())}")
    text = _from_file(path)
    if not text.strip():
        raise KvqError(f"{path} holds no text")
    return text


def dataset_names() -> tuple[str, ...]:
    """The names that `--dataset` takes beside files."""
    return (*_BUILT_IN, SELF, *_HUB)


def token_windows(tokenizer, text: str, seqlen: int, samples: int | None = None, seed: int | None = None) -> LongTensor:
    """Cut a text into non-overlapping windows `[samples, seqlen]` of its tokens; the tail is dropped (GPTQ's way).

    samples: how many windows; all that there are where None.
    seed:    picks which ones, at random and in random order; the first ones, in order, where None.
    Raises KvqError when the text is too short, with the tokens found and needed.
    """
    needed = (samples or 1) * seqlen
    if samples is not None and len(text) > needed * _CHARACTERS_PER_TOKEN:
        tokens = _tokens(tokenizer, _excerpt(text, needed * _CHARACTERS_PER_TOKEN, seed))
    else:
        tokens = _tokens(tokenizer, text)
    if tokens.numel() < needed:
        wanted = f"{samples} windows of {seqlen}" if samples else f"one window of {seqlen}"
        raise KvqError(
            f"the text is too short: {tokens.numel():,} tokens found, {needed:,} needed for {wanted}: "
            f"take a longer text, fewer --samples or a smaller --seqlen"
        )
    windows = tokens[: tokens.numel() // seqlen * seqlen].view(-1, seqlen)
    if seed is not None:
        windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))]
    return windows[:samples].contiguous()


@torch.no_grad()
def self_windows(model, tokenizer, seqlen: int, samples: int, seed: int, batch: int = 16) -> LongTensor:
    """Windows `[samples, seqlen]` of text sampled from the model itself, from its first token on (temperature 1).

    Starts with the tokenizer's first token, or a random one where it has none. The end-of-text token is never drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    if tokenizer.bos_token_id is None:
        first = torch.randint(len(tokenizer), (samples, 1), generator=generator)
    else:
        first = torch.full((samples, 1), tokenizer.bos_token_id)
    end = model.generation_config.eos_token_id
    sampled = []
    for start in first.split(batch):
        tokens, cache = start, None
        while tokens.shape[1] < seqlen:
            out = model(tokens[:, -1:].to(model.device), past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[:, -1].float().cpu()
            if end is not None:
                logits[:, end] = -torch.inf
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
        sampled.append(tokens)
    return torch.cat(sampled)


def _tokens(tokenizer, text: str) -> LongTensor:
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]


def _excerpt(text: str, characters: int, seed: int | None) -> str:
    """A stretch of a long text: its beginning, or one at random."""
    start = 0 if seed is None else random.Random(seed).randrange(len(text) - characters + 1)
    return text[start : start + characters]


def _pydoc(split: str) -> str:
    """The documentation of the language, which every CPython carries: every other topic for each split.

    Topics quote each other: the evaluation leaves out the paragraphs that calibration has.
    """
    from pydoc_data.topics import topics

    halves = ([topics[name] for name in sorted(topics)[half::2]] for half in (0, 1))
    calibration, evaluation = ("\n\n".join(half).split("\n\n") for half in halves)
    seen = set(calibration)
    return "\n\n".join(calibration if split == "calibration" else (p for p in evaluation if p not in seen))


_BUILT_IN: dict[str, Callable[[str], str]] = {"prose": reference.prose, "pydoc": _pydoc}

# Where the hub keeps a dataset: arguments of `datasets.load_dataset` per split, the column, and what joins its rows.
_WIKITEXT = {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1"}
_C4 = {"path": "allenai/c4", "split": "train"}
_PTB = "hf://datasets/ptb-text-only/ptb_text_only@refs/convert/parquet/penn_treebank/{}/0000.parquet"
_HUB = {
    "wikitext2": (
        {"calibration": _WIKITEXT | {"split": "train"}, "evaluation": _WIKITEXT | {"split": "test"}},
        "text",
        "\n\n",
    ),
    "c4": (
        {
            "calibration": _C4 | {"data_files": "en/c4-train.00000-of-01024.json.gz"},
            "evaluation": _C4 | {"data_files": "en/c4-validation.00000-of-00008.json.gz"},
        },
        "text",
        "\n\n",
    ),
    "ptb": (
        {
            "calibration": {"path": "parquet", "data_files": _PTB.format("train"), "split": "train"},
            "evaluation": {"path": "parquet", "data_files": _PTB.format("test"), "split": "train"},
        },
        "sentence",
        " ",
    ),
}


def _from_hub(name: str, split: str) -> str:
    arguments, column, joint = _HUB[name]
    try:
        import datasets
    except ImportError as error:
        raise KvqError(f"dataset {name!r} needs the package `datasets`: install it, or use {OFFLINE}") from error
    try:
        with _quiet("huggingface_hub", "datasets"):
            rows = datasets.load_dataset(**arguments[split])
    except Exception as error:  # offline, a proxy's refusal, a moved repository: each library has its own classes
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise KvqError(f"dataset {name!r} cannot be loaded ({reason}); without a network use {OFFLINE}") from error
    return joint.join(rows[column])


def _from_file(path: Path) -> str:
    """A file's text: JSON lines and Parquet give their field `text`, all else is plain text; .xz and .gz unpack."""
    openers = {".xz": lzma.open, ".gz": gzip.open}
    kind = (path.with_suffix("") if path.suffix in openers else path).suffix
    try:
        if path.suffix == ".parquet":
            return "\n\n".join(_parquet_rows(path))
        with openers.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            return "\n\n".join(_json_rows(file, path)) if kind == ".jsonl" else file.read()
    except (OSError, UnicodeDecodeError, EOFError, lzma.LZMAError) as error:
        raise KvqError(f"cannot read the text of {path}: {error}") from error


def _json_rows(lines: Iterator[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise KvqError(f'{path}, line {number}: not a JSON object with the field "text"') from error


def _parquet_rows(path: Path) -> list[str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise KvqError(
            f"reading {path} needs the package `pyarrow`: install it, or use a .txt or .jsonl file"
        ) from error
    try:
        return read_table(path, columns=["text"])["text"].to_pylist()
    except (ArrowException, KeyError) as error:
        raise KvqError(f'{path} is not a Parquet file with the column "text"') from error


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Keep the libraries' retry messages off the screen: what they end in is reported in one line."""
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
