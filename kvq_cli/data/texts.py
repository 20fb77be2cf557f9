"""Text by name, and the token windows that calibration and perplexity cut from it.

Names: `wikitext2`, `c4` and `ptb`, from the Hub or a local copy; the built-in `prose` and `pydoc`, which are always
there offline; or a file. Each has two splits, `calibration` and `evaluation`, that share no text (a file is the same
text in both). The dataset `self` is text sampled from the model: it comes as tokens, from `sampled_windows`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import LongTensor

from kvq_cli import reference
from kvq_cli.data.hub import HUB, hub_rows
from kvq_cli.data.local import file_format, read_rows, read_text
from kvq_cli.errors import KvqError, UsageError

SELF = "self"
SPLITS = reference.SPLITS
C4_SAMPLES = 256
"""Windows of C4 that GPTQ and KVQuant measure perplexity on."""
# A vocabulary seldom spends more tokens than one for two characters or packs more than eight into one: reading this
# much of a long text is enough to cut the windows from.
_CHARACTERS_PER_TOKEN = 8


def load_text(name: str, split: str, data_dir: Path | None = None) -> str:
    """The text of one dataset as one string, its rows joined by blank lines.

    data_dir: where local copies of `wikitext2`, `c4` and `ptb` lie, used in the place of the Hub.
    Raises UsageError for a name that is neither a dataset nor a file, KvqError where it cannot be read or reached.
    """
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}: {' or '.join(SPLITS)}")
    if name in _BUILT_IN:
        return _BUILT_IN[name](split)
    if name in HUB:
        return "\n\n".join(hub_rows(name, split, data_dir))
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"no dataset {name!r}: neither a file nor one of {', '.join(dataset_names())}")
    text = _from_file(path)
    if not text.strip():
        raise KvqError(f"{path} holds no text")
    return text


def evaluation_windows(tokenizer, name: str, seqlen: int, seed: int = 0, data_dir: Path | None = None) -> LongTensor:
    """The windows `[samples, seqlen]` that perplexity on a dataset is measured on, as GPTQ and KVQuant cut them.

    All of the text, in order; of C4, 256 windows from documents drawn by `seed` (theirs is 0).
    """
    if name == "c4":
        return document_windows(tokenizer, hub_rows(name, "evaluation", data_dir), seqlen, C4_SAMPLES, seed)
    return token_windows(tokenizer, load_text(name, "evaluation", data_dir), seqlen)


def document_windows(tokenizer, documents: Sequence[str], seqlen: int, samples: int, seed: int) -> LongTensor:
    """Windows `[samples, seqlen]`, each from within one document, drawn with replacement: the draws of GPTQ's `get_c4`.

    Raises KvqError where no document is long enough.
    """
    draw, short, windows = random.Random(seed), set(), []
    while len(windows) < samples:
        index = draw.randint(0, len(documents) - 1)
        tokens = _tokens(tokenizer, documents[index])
        if len(tokens) >= seqlen:
            start = draw.randint(0, len(tokens) - seqlen - 1) if len(tokens) > seqlen else 0
            windows.append(tokens[start : start + seqlen])
            continue
        short.add(index)
        if len(short) == len(documents):
            raise KvqError(f"none of {len(documents):,} documents has {seqlen:,} tokens: take a smaller --seqlen")
    return torch.stack(windows)


def dataset_names() -> tuple[str, ...]:
    """The names that `--dataset` takes beside files."""
    return (*_BUILT_IN, SELF, *HUB)


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
def sampled_windows(model, tokenizer, seqlen: int, samples: int, seed: int, batch: int = 16) -> LongTensor:
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


def _from_file(path: Path) -> str:
    """A file's text: JSON lines and Parquet give their field `text`, all else is plain text; .xz and .gz unpack."""
    if file_format(path) in (".jsonl", ".parquet"):
        return "\n\n".join(row["text"] for row in read_rows(path, "text"))
    return read_text(path)
