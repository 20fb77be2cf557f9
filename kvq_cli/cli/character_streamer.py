"""Stream generated text in whole characters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CharacterStreamer:
    """A streamer for transformers' `generate` that passes on text as soon as its bytes form whole characters."""

    tokenizer: Any
    write: Callable[[str], None]
    first_token_time: float = 0.0  # of `time.perf_counter`
    pieces: list[str] = field(default_factory=list)
    _prompt_seen: bool = False
    _ids: list[int] = field(default_factory=list)
    _written: int = 0

    def put(self, tokens: Any) -> None:
        if not self._prompt_seen:  # `generate` passes the prompt first
            self._prompt_seen = True
            return
        self.first_token_time = self.first_token_time or time.perf_counter()
        self._ids += tokens.flatten().tolist()
        text = self._text(self._ids)
        if not text.endswith("\ufffd"):  # an incomplete character
            self._write_new(text)
            if text.endswith("\n"):
                self._forget_line()

    def _forget_line(self) -> None:
        """Keep the line break alone, so that a complete line is not decoded again with every token.

        Some decoders strip a space at the beginning of the text: without the line break, of the next line's indent.
        """
        kept = self._text(self._ids[-1:])
        if kept.endswith("\n"):  # not so behind a special token, which has no text
            self._ids, self._written = self._ids[-1:], len(kept)

    def end(self) -> None:
        """The end of a call of `generate`: another one may continue the text."""
        self._prompt_seen = False

    def finish(self) -> None:
        """Write what is left, also of an incomplete character."""
        self._write_new(self._text(self._ids))

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _write_new(self, text: str) -> None:
        if piece := text[self._written :]:
            self.pieces.append(piece)
            self.write(piece)
            self._written = len(text)
