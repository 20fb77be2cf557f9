"""RULER's word lists, from the wonderwords package, loaded as RULER loads them.

wonderwords is imported inside the functions: only generating samples needs it.
"""

from __future__ import annotations

from functools import cache


@cache
def adjectives() -> tuple[str, ...]:
    """Adjectives of keys (`rough` in `rough-sun`), sorted."""
    return _word_file("adjectivelist.txt")


@cache
def nouns() -> tuple[str, ...]:
    """Nouns of keys (`sun` in `rough-sun`), sorted."""
    return _word_file("nounlist.txt")


@cache
def list_words() -> tuple[str, ...]:
    """Words of `cwe`'s lists: nouns, adjectives and verbs, sorted."""
    from wonderwords import RandomWord

    return tuple(sorted(set(RandomWord().filter(include_categories=["nouns", "adjectives", "verbs"]))))


def _word_file(name: str) -> tuple[str, ...]:
    from wonderwords import random_word

    return tuple(sorted(set(random_word._get_words_from_text_file(name))))
