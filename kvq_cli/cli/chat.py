"""`kvq chat`: a conversation that keeps its compressed cache across turns."""

from __future__ import annotations

from kvq_cli.cli import options as opt
from kvq_cli.cli.chat_session import ChatSession
from kvq_cli.cli.conversation import Conversation
from kvq_cli.cli.generate import DecodingOptions, SamplingModelOptions, System
from kvq_cli.cli.interrupts import Interrupts
from kvq_cli.cli.message_input import messages
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import Output
from kvq_cli.cli.text_generator import attached_generator

TOY = (
    "The built-in model is a toy of 5.4M parameters: it continues prose and finds facts in the text before a question. "
    "For a conversation: --model smollm2."
)


@grouped
def chat(
    decoding: DecodingOptions,
    compression: opt.CompressionOptions,
    model_options: SamplingModelOptions,
    system: System = None,
    prefill: opt.Prefill = "exact",
    config: opt.Config = None,
    quiet: opt.Quiet = False,
) -> None:
    """Chat with a model; its compressed cache is kept across turns. Type /help for the commands.

    Ctrl-C stops an answer and keeps its text so far; Ctrl-D, or Ctrl-C twice, quits. Typed lines are kept for the arrow
    keys in ~/.local/state/kvq/chat_history.
    """
    out = Output(quiet=quiet)
    from kvq_cli.models import REFERENCE

    parameters = decoding.decoding(model_options.seed)
    with attached_generator(model_options, compression, prefill, parameters) as generator:
        for line in [*generator.notes, *([TOY] if generator.loaded.name == REFERENCE else [])]:
            out.note(line)
        out.note(f"{generator.loaded.label}; /help lists the commands, Ctrl-C stops an answer, Ctrl-D quits")
        interrupts = Interrupts()
        session = ChatSession(Conversation(generator, note=out.note), out, interrupts)
        if system is not None:
            session.set_system(system)
        with interrupts.installed():
            session.run(messages(interrupts, out.note))
