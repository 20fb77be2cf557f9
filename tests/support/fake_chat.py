"""`kvq chat` with a model that needs no time to load: it says "word 1 word 2 ..." until it is stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvq_cli.cli.chat_session import ChatSession
from kvq_cli.cli.interrupts import Interrupts
from kvq_cli.cli.message_input import messages
from kvq_cli.cli.output import Output
from kvq_cli.cli.text_generator import GeneratedText


class FakeConversation:
    generator = SimpleNamespace(loaded=SimpleNamespace(context=100))

    def ask(self, message: str, write: Callable[[str], None], stop: Callable[[], bool]) -> Any:
        """Echo the message and count words; for "prefill", there is a long time before the first word."""
        write(f"<{message}>")
        if message == "prefill":
            for _ in range(600):  # one long sleep would outlast a Ctrl-C that comes just before its system call
                time.sleep(0.05)
        count = 3 if message.startswith("short") else 600
        words: list[int] = []
        while len(words) < count:
            time.sleep(0.05)
            words.append(len(words))
            write(f" word {len(words)}")
            if stop():
                break
        return GeneratedText("words", words, 1, 1.0, 0.1, 2.0, {"bytes": 1, "fp16_bytes": 8})


def main() -> None:
    interrupts, out = Interrupts(), Output()
    with interrupts.installed():
        print("ready")
        ChatSession(FakeConversation(), out, interrupts).run(messages(interrupts, out.note))  # type: ignore[arg-type]
        time.sleep(0.3)  # as long as it takes to leave
    print("left")
    sys.exit(0)
