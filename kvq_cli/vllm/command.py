"""What `kvq serve` checks and computes before vLLM starts: the method's fit, the block size, the arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.vllm.checks import check_flags, check_model, check_plans
from kvq_cli.vllm.layout import CacheLayout, cache_layout, token_bytes
from kvq_cli.vllm.served import CACHE_DTYPE, KEY, ServedMethod

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ServePlan:
    """A server that can be started. source: the model's folder or Hub id. flags: vLLM's own."""

    served: ServedMethod
    shape: ModelShape
    layout: CacheLayout
    source: str
    name: str
    flags: tuple[str, ...]

    def arguments(self) -> list[str]:
        """The arguments of `vllm`."""
        dtype = str(self.shape.dtype).removeprefix("torch.")
        words = ["serve", self.source, "--dtype", dtype, "--kv-cache-dtype", CACHE_DTYPE]
        words += ["--block-size", str(self.layout.block_size), "--attention-backend", "CUSTOM"]
        if flag_value(self.flags, "--served-model-name") is None:
            words += ["--served-model-name", self.name]
        config = {**self._additional(), **self.served.additional_config()}
        return [*words, "--additional-config", json.dumps(config), *without(self.flags, _OWN)]

    def _additional(self) -> dict[str, Any]:
        given = flag_value(self.flags, "--additional-config")
        return {} if given is None else json.loads(given)

    def summary(self) -> str:
        """The sizes of the cache, in words."""
        layout, exact = self.layout, self.layout.exact
        per_token = layout.page_bytes * self.shape.layers / layout.block_size
        plain = token_bytes(self.shape) * self.shape.layers
        dtype = str(self.shape.dtype).removeprefix("torch.")
        text = (
            f"a block: {layout.block_size} tokens in {layout.page_bytes:,} bytes a layer; {per_token:,.0f} bytes a "
            f"token, {plain / per_token:.2f} times fewer than {plain:,} in {dtype}"
        )
        if exact is not None:
            text += (
                f"; in full precision: {exact.sinks} first and up to {exact.recent} newest tokens, {exact.block_size} "
                f"to a block, up to {exact.blocks} blocks a sequence"
            )
        return text


#: Flags of vLLM that kvq computes, and may be given to it.
_OWN = ("--block-size", "--additional-config", "--kv-cache-dtype", "--attention-backend", "--dtype")


def serve_plan(
    served: ServedMethod, config: PretrainedConfig, shape: ModelShape, source: str, name: str, flags: Sequence[str]
) -> ServePlan:
    """Check that the method can be served with this model and these flags. Raises UsageError with the reason."""
    check_flags(flags)
    check_model(config, name)
    plans = served.plans(shape)
    check_plans(served.method, plans)
    size = flag_value(flags, "--block-size")
    if size is not None and not size.isdecimal():
        raise UsageError(f"--block-size {size}: must be a whole number")
    additional = flag_value(flags, "--additional-config")
    if additional is not None:
        _check_additional(additional)
    layout = cache_layout(plans, shape, None if size is None else int(size))
    return ServePlan(served, shape, layout, source, name, tuple(flags))


def _check_additional(text: str) -> None:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or KEY in given:
        raise UsageError(f'--additional-config {text}: must be a JSON object without "{KEY}", which kvq serve writes')


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The value of a flag in `--flag value` or `--flag=value`; None: it is not given."""
    for i, word in enumerate(flags):
        if word == name and i + 1 < len(flags):
            return flags[i + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """The flags but for these and their values."""
    kept, skip = [], False
    for word in flags:
        if skip:
            skip = False
        elif word in names:
            skip = True
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return kept
