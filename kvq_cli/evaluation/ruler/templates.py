"""Prompt templates: RULER's own, and those that the built-in reference model was trained on.

Both get the same sample contents (haystacks, depths, values, questions); only the instructions differ.
"""

from __future__ import annotations

from typing import Protocol

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.ruler.sample_types import Chain, CodedWords, CommonWords, Needles, Passages, Prompt
from kvq_cli.models import REFERENCE
from kvq_cli.reference import prompts


class Templates(Protocol):
    """Turns sample contents into prompts. examples: put a solved example in front of `vt` and `cwe`, as RULER does."""

    name: str
    examples: bool

    def assignment(self, target: str, source: str, first: bool) -> str: ...
    def needles(self, content: Needles) -> Prompt: ...
    def chain(self, content: Chain) -> Prompt: ...
    def common_words(self, content: CommonWords) -> Prompt: ...
    def coded_words(self, content: CodedWords) -> Prompt: ...
    def passages(self, content: Passages) -> Prompt: ...


class StandardTemplates:
    """RULER's base templates, verbatim, with its answer prefixes and its one solved example for `vt` and `cwe`."""

    name = "standard"
    examples = True

    def assignment(self, target: str, source: str, first: bool) -> str:
        # RULER puts a blank at the end of all assignments but the first.
        return f"VAR {target} = {source}" if first else f"VAR {target} = VAR {source} "

    def needles(self, content: Needles) -> Prompt:
        kind = content.kind[:-1] if content.single else content.kind
        some, hidden, are_all, are = ("A", "is", "is", "is") if content.single else ("Some", "are", "are all", "are")
        asked = _series(content.queries)
        context = (" " if content.prose else "\n").join(content.lines)
        return Prompt(
            f"{some} special magic {kind} {hidden} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.\n{context}\n"
            f"What {are_all} the special magic {kind} for {asked} mentioned in the provided text?",
            f" The special magic {kind} for {asked} mentioned in the provided text {are}",
        )

    def chain(self, content: Chain) -> Prompt:
        text = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            + "\n".join(content.lines)
            + f"\nQuestion: Find all variables that are assigned the value {content.value} in the text above."
        )
        prefix = (
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(content.names)} variables are assigned the value {content.value}, they are: "
        )
        if content.example:
            text = f"{self.chain(content.example)} {' '.join(content.example.names)}\n\n{text}"
        return Prompt(text, prefix)

    def common_words(self, content: CommonWords) -> Prompt:
        text = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            "Memorize the ones that appear most often.\n"
            + prompts.numbered_words(content.words)
            + f"\nQuestion: What are the {len(content.common)} most common words in the above list?"
        )
        prefix = f" Answer: The top {len(content.common)} words that appear most often in the list are:"
        if content.example:
            text = f"{self.common_words(content.example)} {prompts.numbered_words(content.example.common)}\n{text}"
        return Prompt(text, prefix)

    def coded_words(self, content: CodedWords) -> Prompt:
        return Prompt(
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(content.words)}\n"
            "Question: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            " Answer: According to the coded text above, the three most frequently appeared words are:",
        )

    def passages(self, content: Passages) -> Prompt:
        order = (
            "Answer the question based on the given documents. "
            "Only give me the answer and do not output any other words."
        )
        documents = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(content.documents, 1))
        return Prompt(
            f"{order}\n\nThe following are given documents.\n\n{documents}\n\n{order}\n\nQuestion: {content.question}",
            " Answer:",
        )


class ReferenceTemplates:
    """Prompts that the built-in model was trained on, without solved examples."""

    name = "reference"
    examples = False

    def assignment(self, target: str, source: str, first: bool) -> str:
        return prompts.chain_fact(source, target)

    def needles(self, content: Needles) -> Prompt:
        return _reference_prompt(
            content.lines, prompts.question(content.kind, content.queries, many=content.values > 1)
        )

    def chain(self, content: Chain) -> Prompt:
        return _reference_prompt(content.lines, prompts.chain_question(content.value))

    def common_words(self, content: CommonWords) -> Prompt:
        question = prompts.common_words_question(len(content.common))
        return Prompt(prompts.prompt(prompts.numbered_words(content.words), question))

    def coded_words(self, content: CodedWords) -> Prompt:
        return _reference_prompt(content.words, prompts.coded_words_question(len(content.frequent)))

    def passages(self, content: Passages) -> Prompt:
        documents = (prompts.document(number, text) for number, text in enumerate(content.documents, 1))
        return Prompt(prompts.prompt("\n\n".join(documents), prompts.passage_question(content.question)))


def select_templates(name: str, model: str) -> Templates:
    """Templates by name: `standard`, `reference`, or `auto` (`reference` for the built-in model, else `standard`)."""
    standard, reference = StandardTemplates(), ReferenceTemplates()
    if name == "auto":
        return reference if model == REFERENCE else standard
    if name == standard.name:
        return standard
    if name == reference.name:
        return reference
    raise UsageError(f"unknown templates {name!r}; valid: auto, {standard.name}, {reference.name}")


def _reference_prompt(lines: list[str], question: str) -> Prompt:
    return Prompt(prompts.prompt(prompts.context(line for line in lines if line), question))


def _series(names: list[str]) -> str:
    """Join names as RULER does: `a`; `a, and b`; `a, b, and c`."""
    *head, last = names
    return f"{', '.join(head)}, and {last}" if head else last
