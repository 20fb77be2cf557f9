"""The size of a cache in one line: what its tokens take, and what a longer text takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvq_cli.cli.output import human_bytes

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method
    from kvq_cli.models import LoadedModel

#: Tokens of the text whose size is told to who tried a shorter one.
LONG = 4096


def cache_line(report: dict[str, Any], longer: str = "") -> str:
    """`cache: 1.2 MiB instead of 7.1 MiB in 16 bit (5.9x smaller), 2.71 bits per number (nominal 2)`

    Room that no token fills yet is not counted, but said. longer: of `longer_text`.
    """
    if not report["bytes"]:
        return "cache: empty"
    unused, shared = report["parts"].get("unused", 0), report["constant_bytes"]
    held, plain = held_bytes(report), report["fp16_bytes"]
    bits, ratio = report["measured_bits"] * held / report["bytes"], _ratio(held, plain, report["parts"])
    return (
        f"cache: {human_bytes(held)} instead of {human_bytes(plain)} in 16 bit ({ratio}), "
        f"{bits:.2f} bits per number (nominal {report['nominal_bits']:g})"
        + longer
        + (f"; room for more tokens: {human_bytes(unused)}" if unused else "")
        + (f"; beyond sliding windows: {report['beyond_window']:,} numbers" if report.get("beyond_window") else "")
        + (f"; other states: {human_bytes(report['states'])}" if report.get("states") else "")
        + (f"; shared by all sequences: {human_bytes(shared)}" if shared else "")
        + (f"; attention by {report['backend']}" if report.get("backend") else "")
    )


def held_bytes(report: dict[str, Any]) -> int:
    """The bytes that the tokens of a cache take, without room that no token fills yet."""
    return int(report["bytes"] - report.get("parts", {}).get("unused", 0))


def _ratio(held: int, plain: int, parts: dict[str, int]) -> str:
    """How much smaller a cache is, or larger, by its largest part."""
    if held == plain:
        return "the same size"
    if held < plain:
        return f"{plain / held:.1f}x smaller"
    largest = max((name for name in parts if name != "unused"), key=parts.__getitem__)
    return f"{held / plain:.1f}x larger: {human_bytes(parts[largest])} are {largest}"


def longer_text(report: dict[str, Any], method: Method, loaded: LoadedModel) -> str:
    """`; at 4,096 tokens 2.55 bits, smaller than 16 bit from 161 tokens on`, counted from the shapes of the tensors.

    Empty for a longer text: where most tokens of the cache are packed, and it is smaller than in 16 bit.
    """
    tokens = min(LONG, loaded.context)
    if report["tokens"] >= tokens:
        return ""
    is_short = report["compressed_tokens"] <= report["tokens"] / 2 or held_bytes(report) >= report["fp16_bytes"]
    if method.nominal_bits == 16 or not is_short:
        return ""
    from kvq_cli.benchmarking.accounting import account
    from kvq_cli.benchmarking.capacity import largest

    def bits(tokens: int) -> float:
        counted = account(method, loaded.shape, tokens)
        return counted.measured_bits * held_bytes(counted.to_dict()) / counted.bytes

    last = largest(lambda tokens: bits(tokens) >= 16, 1, loaded.context)
    smaller = f", smaller than 16 bit from {last + 1:,} tokens on" if last < loaded.context else ""
    return f"; at {tokens:,} tokens {bits(tokens):.2f} bits{smaller}"
