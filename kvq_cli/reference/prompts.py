"""The prompt format of the reference model: sentences, questions and answers, for training and evaluation.

A prompt is `prompt(context, question)`. The context is a list of sentences joined by spaces; the question starts a new
line and ends with `Answer:`; the model continues with the answer, whose first character is a space, and ends it with
`<|eos|>` (`STOP_TOKEN`). The tokenizer adds `<|bos|>` in front.

Every answer is a lookup by content: it repeats a key and continues with the text after that key in the context.
Keys, values and names always follow a space, so that they are the same tokens in the context, the question and the
answer. Therefore `prompt` begins with a space, and contexts are joined by spaces, never by line breaks.

This module imports no other package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

STOP_TOKEN = "<|eos|>"
"""The token at which generation stops: the model's `eos_token_id`."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's repeated haystack sentence."""

KINDS = ("numbers", "words", "uuids")
"""Kinds of needle values, named as in RULER (`type_needle_v`)."""


def needle(key: str, value: str, kind: str = "numbers") -> str:
    """RULER's needle sentence: ``One of the special magic numbers for rough-sun is: 1234567.``"""
    return f"One of the special magic {_check_kind(kind)} for {key} is: {value}."


def context(sentences: Iterable[str]) -> str:
    """The context: sentences of a haystack, with needles and facts among them, joined by spaces."""
    return " ".join(sentences)


def prompt(context: str, question: str) -> str:
    """The whole prompt, up to and including ``Answer:``; begins with a space (see the module's docstring)."""
    return f" {context}{question}"


def question(kind: str, keys: Sequence[str], many: bool = False) -> str:
    """The question for the values of `keys`. many: a single key has several values.

    ``\\nQuestion: What is the special magic number for rough-sun?\\nAnswer:``
    ``\\nQuestion: What are the special magic numbers for rough-sun, calm-oak and odd-cup?\\nAnswer:``
    """
    _check_kind(kind)
    if not keys:
        raise ValueError("a question needs at least one key")
    if len(keys) == 1 and not many:
        return _ask(f"What is the special magic {kind[:-1]} for {keys[0]}?")
    return _ask(f"What are the special magic {kind} for {listing(keys)}?")


def answer(pairs: Iterable[tuple[str, str]]) -> str:
    """The answer, one clause per (key, value): `` rough-sun is: 1234567. calm-oak is: 7654321.``

    Keys are in the order of the question; several values of a key are in ascending order, with the key repeated.
    """
    return "".join(f" {key} is: {value}." for key, value in pairs)


def chain_fact(source: str, target: str) -> str:
    """An assignment for variable tracking, source first: ``12345 -> ABCDE.``, later ``ABCDE -> FGHIJ.``"""
    return f"{source} -> {target}."


def chain_question(value: str) -> str:
    """``\\nQuestion: Which variables does 12345 reach?\\nAnswer: 12345 ->``: the answer continues the chain."""
    return _ask(f"Which variables does {value} reach?") + f" {value} ->"


def chain_answer(names: Sequence[str]) -> str:
    """`` ABCDE -> FGHIJ -> KLMNO.``: at most 30 tokens for RULER's five names of five letters."""
    return " " + " -> ".join(names) + "."


def numbered_words(words: Iterable[str]) -> str:
    """RULER's list for common words: ``1. word 2. word 3. word``"""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def common_words_question(count: int = 10) -> str:
    """The question for the `count` most common words of a numbered list."""
    return _ask(f"What are the {count} most common words in the list?")


def coded_words_question(count: int = 3) -> str:
    """The question for the `count` most frequent words of a coded text, whose padding ``...`` does not count."""
    return _ask(f"What are the {count} most frequent coded words?")


def words_answer(words: Sequence[str]) -> str:
    """`` word, other, third.``: by descending frequency, then in the order of first appearance."""
    return " " + ", ".join(words) + "."


def document(number: int, text: str) -> str:
    """A passage of a question-answering context: ``Document 1:\\n...``"""
    return f"Document {number}:\n{text}"


def passage_question(text: str) -> str:
    """A free question about passages, whose answer is a short phrase in one of them."""
    return _ask(text.strip())


def passage_answer(text: str) -> str:
    """The short phrase that answers a `passage_question`."""
    return f" {text.strip()}."


def listing(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``"""
    *head, last = items
    return f"{', '.join(head)} and {last}" if head else last


def _check_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"unknown kind of needle {kind!r}; valid: {', '.join(KINDS)}")
    return kind


def _ask(text: str) -> str:
    return f"\nQuestion: {text}\nAnswer:"
