"""Rules of options: when a command does not read an option that was given, it announces that, or refuses the request.

A rule stands in the option's type: `Annotated[Seqlen, unless(perplexity, "only perplexity reads it")]`, or at a group
of options, for all of them. The outermost one holds; an option without a rule is always read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from kvq_cli.errors import KvqError, UsageError

Values = Mapping[str, Any]
"""The values of a command's parameters, by parameter name."""


@dataclass(frozen=True)
class Rule:
    """notes: sentences about a given option that has no effect, or on some methods only, from the command's values and
    the flag. refuse: raise UsageError with them, because the request contradicts itself."""

    notes: Callable[[Values, str], Iterable[str]]
    refuse: bool = False


def unless(reads: Callable[[Values], bool], why: str, refuse: bool = False) -> Rule:
    """The rule of an option that the command reads if `reads` says so."""
    return Rule(lambda values, flag: [] if reads(values) else [f"{flag} has no effect: {why}"], refuse)


#: Overrides the rule of an option that this command, unlike another one, always reads.
read = Rule(lambda values, flag: ())


def either(*rules: Rule) -> Rule:
    """The notes of the first rule that has any."""
    return Rule(
        lambda values, flag: next((found for rule in rules if (found := list(rule.notes(values, flag)))), []),
        any(rule.refuse for rule in rules),
    )


HELP_ALL = "_help_all"


def _show_all(ctx: typer.Context, shown: bool) -> None:
    if shown and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options, and exit.")
]
"""The option of a command with an attribute `everyday`: the names of the parameters that its --help shows."""


class AnnouncingCommand(TyperCommand):
    """A command that announces, before it runs, the options that it will not read."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        everyday = getattr(self.callback, "everyday", None)
        others: list[Any] = []
        if everyday and not ctx.meta.get(HELP_ALL):
            others = [each for each in self.params if each.name not in (*everyday, HELP_ALL)]
        try:
            for parameter in others:
                parameter.hidden = True
            super().format_help(ctx, formatter)
        finally:
            for parameter in others:
                parameter.hidden = False

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        for note in unused(self, ctx.params, given_options(ctx)):
            if not ctx.params.get("quiet"):
                print(f"note: {note}", file=sys.stderr)
        return super().invoke(ctx)


def rules_of(command: TyperCommand) -> dict[str, Rule]:
    """The rules of the parameters that the command does not always read, by name."""
    hints = get_type_hints(command.callback, include_extras=True)
    items = ((name, item) for name, hint in hints.items() for item in getattr(hint, "__metadata__", ()))
    rules = {name: item for name, item in items if isinstance(item, Rule)}  # outer items come last
    return {name: rule for name, rule in rules.items() if rule is not read}


def unused(command: TyperCommand, values: Values, given: Sequence[str]) -> list[str]:
    """Notes on the given options that the command does not read; UsageError if the request contradicts itself."""
    rules, flags = rules_of(command), {parameter.name: parameter.opts[0] for parameter in command.params}
    notes: list[str] = []
    for name in given:
        if name not in rules:
            continue
        try:
            found = list(rules[name].notes(values, flags[name]))
        except (KvqError, ValueError):  # an invalid value, which the command reports
            continue
        if found and rules[name].refuse:
            raise UsageError(found[0])
        notes += found
    return notes


def given_options(ctx: typer.Context) -> list[str]:
    """Names of the parameters that the command line or `--config` gave."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = [name for name, source in sources.items() if source and source.name in ("COMMANDLINE", "DEFAULT_MAP")]
    # Older versions of typer call a list that was left out given, and empty.
    return [name for name in given if ctx.params[name] not in (None, [], ())]
