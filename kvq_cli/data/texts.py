"""Load text by dataset name, and cut it into token windows for calibration and perplexity.

Datasets: `wikitext2`, `c4` and `ptb`, from the Hub or a local copy; the built-in `prose` and `pydoc`; or a file,
with rows also `FILE:FIELD`. Each has two splits, `calibration` and `evaluation`, that share no text (a file gives the
same text for both). The dataset `self` is text sampled from the model: `sampled_windows` gives its tokens.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli import reference
from kvq_cli.cache_argument import cache_argument, cache_name
from kvq_cli.data.hub import HUB, hub_rows
from kvq_cli.data.local import file_format, read_rows, read_text
from kvq_cli.errors import KvqError, UsageError, did_you_mean
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SELF = "self"
#: Field of a row that holds its text, and the files with rows: `FILE:FIELD` names another field.
TEXT_FIELD, _WITH_FIELDS = "text", (".jsonl", ".parquet")
SPLITS = reference.SPLITS
C4_SAMPLES = 256
"""Windows of C4 that GPTQ and KVQuant measure perplexity on."""
#: Tokens rarely average more characters. Of a long text, only this much per needed token is tokenized at first.
_CHARACTERS_PER_TOKEN = 8


def load_text(name: str, split: str, data_dir: Path | None = None) -> str:
    """The text of one dataset as one string, its rows joined by blank lines.

    data_dir: folder with local copies of `wikitext2`, `c4` and `ptb`, read instead of the Hub.
    Raises UsageError for a name that is neither a dataset nor a file, KvqError where the text cannot be loaded.
    """
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}: {' or '.join(SPLITS)}")
    if name in _BUILT_IN:
        return _BUILT_IN[name](split)
    if name in HUB:
        return "\n\n".join(hub_rows(name, split, data_dir))
    if name == SELF:  # needs a model
        raise _unknown(name)
    check_dataset(name)
    path, field = _file_and_field(name)
    text = _from_file(path, field)
    if not text.strip():
        raise KvqError(f"{path} contains no text")
    return text


def evaluation_windows(
    tokenizer: PreTrainedTokenizerBase, name: str, seqlen: int, seed: int = 0, data_dir: Path | None = None
) -> Tensor:
    """Windows for perplexity as GPTQ and KVQuant cut them, int64 `[samples, seqlen]`.

    The whole text, in order; for C4, 256 windows from documents drawn with `seed` (GPTQ's is 0).
    """
    if name == "c4":
        return document_windows(tokenizer, hub_rows(name, "evaluation", data_dir), seqlen, C4_SAMPLES, seed)
    return token_windows(tokenizer, load_text(name, "evaluation", data_dir), seqlen)


def document_windows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], seqlen: int, samples: int, seed: int
) -> Tensor:
    """Windows within single documents, drawn with replacement as by GPTQ's `get_c4`: int64 `[samples, seqlen]`.

    Raises KvqError where no document is long enough, or there is none.
    """
    if not documents:
        raise KvqError("the dataset has no document: give another --dataset or --data-dir")
    draw = random.Random(seed)
    short: set[int] = set()
    windows: list[Tensor] = []
    start = _window_start(tokenizer, seqlen)
    length = seqlen - len(start)
    while len(windows) < samples:
        index = draw.randint(0, len(documents) - 1)
        tokens = _behind(start, _tokens(tokenizer, documents[index]))
        if len(tokens) >= length:
            first = draw.randint(0, len(tokens) - length - 1) if len(tokens) > length else 0
            windows.append(torch.cat([start, tokens[first : first + length]]))
            continue
        short.add(index)
        if len(short) == len(documents):
            raise KvqError(f"none of {len(documents):,} documents has {seqlen:,} tokens: take a smaller --seqlen")
    return torch.stack(windows)


def file_digest(dataset: str) -> str | None:
    """The sha256 of a text file, which its path does not tell; None for a dataset with a name."""
    path, _ = _file_and_field(dataset)
    if dataset in dataset_names() or not path.is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_name(dataset: str) -> str:
    """The name of a dataset in tables: of a file, its name without extensions, and its field."""
    path, field = _file_and_field(dataset)
    if not path.is_file():
        return dataset
    suffix = "" if field == TEXT_FIELD else f"_{re.sub(r'[^A-Za-z0-9]+', '_', field)}"  # it becomes part of file names
    return path.name.split(".")[0] + suffix


def dataset_names() -> tuple[str, ...]:
    """The datasets that `--dataset` accepts beside files."""
    return (*_BUILT_IN, SELF, *HUB)


def check_dataset(name: str) -> None:
    """Raise UsageError for a name that is neither a dataset nor a file."""
    if name in dataset_names():
        return
    path, field = _file_and_field(name)
    if not path.is_file():
        raise _unknown(name)
    if field != TEXT_FIELD and file_format(path) not in _WITH_FIELDS:
        raise UsageError(f"{name}: only {' and '.join(_WITH_FIELDS)} files have fields, such as {field!r}")


def _file_and_field(name: str) -> tuple[Path, str]:
    """The file of `FILE` or `FILE:FIELD`, and the field of its rows that holds text."""
    before, _, field = name.rpartition(":")
    if field and not Path(name).is_file() and Path(before).is_file():
        return Path(before), field
    return Path(name), TEXT_FIELD


def _unknown(name: str) -> UsageError:
    known = [each for each in dataset_names() if each != name]
    return UsageError(f"no dataset {name!r}: neither a file nor one of {', '.join(known)}{did_you_mean(name, known)}")


def token_windows(
    tokenizer: PreTrainedTokenizerBase, text: str, seqlen: int, samples: int | None = None, seed: int | None = None
) -> Tensor:
    """Cut a text into non-overlapping token windows, int64 `[samples, seqlen]`; the tail is dropped, as in GPTQ.

    samples: number of windows; None: all.
    seed:    draw windows at random, in random order; None: the first ones, in order.
    Raises KvqError for a text that is too short.
    """
    start = _window_start(tokenizer, seqlen)
    length = seqlen - len(start)
    needed = (samples or 1) * length
    excerpt = text if samples is None else _excerpt(text, needed * _CHARACTERS_PER_TOKEN, seed)
    tokens = _behind(start, _tokens(tokenizer, excerpt))
    if tokens.numel() < needed and len(excerpt) < len(text):  # its tokens are longer, such as rules of dashes
        tokens = _behind(start, _tokens(tokenizer, text))
    if tokens.numel() < needed:
        wanted = f"{samples} windows of {seqlen}" if samples else f"one window of {seqlen}"
        raise KvqError(
            f"the text is too short: {tokens.numel():,} tokens found, {needed:,} needed for {wanted}: "
            f"take a longer text, fewer --samples or a smaller --seqlen"
        )
    windows = tokens[: tokens.numel() // length * length].view(-1, length)
    if seed is not None:
        windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))]
    windows = windows[:samples]
    return torch.cat([start.expand(len(windows), -1), windows], dim=1)


def sampled_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seqlen: int,
    samples: int,
    seed: int,
    batch: int = 16,
) -> Tensor:
    """Text sampled from the model at temperature 1, int64 `[samples, seqlen]`.

    Starts with the BOS token, or a random token where the tokenizer has none. The EOS token is never drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    if tokenizer.bos_token_id is None:
        first = torch.randint(len(tokenizer), (samples, 1), generator=generator)
    else:
        first = torch.full((samples, 1), tokenizer.bos_token_id)

    def draw(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)

    return torch.cat([continued(model, start, seqlen, draw) for start in first.split(batch)])


def continued(model: PreTrainedModel, tokens: Tensor, length: int, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `tokens` `[rows, tokens]` continued to `[rows, length]` by the model with its own cache.

    draw: next tokens `[rows, 1]` from float32 logits `[rows, vocabulary]`, where those of EOS are -inf.
    """
    ends, cache, new = never_drawn(model), None, tokens
    while tokens.shape[1] < length:
        with torch.no_grad():
            out = model(new.to(model.device), **cache_argument(cache), use_cache=True, logits_to_keep=1)
        cache, logits = getattr(out, cache_name()), out.logits[:, -1].float().cpu()
        logits[:, ends] = -torch.inf
        new = draw(logits)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


def never_drawn(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end texts, which samples do not have."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else [*ends]


def unknown_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the token for what a text leaves out, as in WikiText-2, or what the tokenizer cannot write: no model
    predicts it. None where there is none, or it also begins or ends texts (GPT-2)."""
    token = tokenizer.unk_token_id
    return None if token in (tokenizer.bos_token_id, tokenizer.eos_token_id) else token


def _window_start(tokenizer: PreTrainedTokenizerBase, seqlen: int) -> Tensor:
    """What each window begins with, int64 `[0 or 1]`: BOS for Gemma, as in lm-eval, because it predicts far worse
    without; else nothing, as in GPTQ."""
    bos = tokenizer.bos_token_id if type(tokenizer).__name__.startswith("Gemma") and seqlen > 1 else None
    return torch.tensor([] if bos is None else [bos], dtype=torch.long)


def _behind(start: Tensor, tokens: Tensor) -> Tensor:
    """The tokens of a text without the start that the tokenizer gave it."""
    return tokens[len(start) :] if tokens[: len(start)].equal(start) else tokens


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]


def _excerpt(text: str, characters: int, seed: int | None) -> str:
    """A part of a long text: its beginning, or a random part; all of a shorter one."""
    if len(text) <= characters:
        return text
    start = 0 if seed is None else random.Random(seed).randrange(len(text) - characters + 1)
    return text[start : start + characters]


_BUILT_IN: dict[str, Callable[[str], str]] = {"prose": reference.prose, "pydoc": reference.pydoc}


def _from_file(path: Path, field: str) -> str:
    """A field of JSON lines and Parquet files; other files are plain text. .xz and .gz are decompressed."""
    if file_format(path) in _WITH_FIELDS:
        return "\n\n".join(row[field] for row in read_rows(path, field))
    return read_text(path)
