"""What `kvq serve` checks and computes before vLLM starts: the method's fit, the block size, the arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import UsageError
from kvq_cli.files import load_json
from kvq_cli.methods.base import ModelShape
from kvq_cli.vllm.checks import check_model, check_plans, refuse_flags
from kvq_cli.vllm.flags import flag_value, without
from kvq_cli.vllm.layout import CacheLayout, cache_layout, token_bytes
from kvq_cli.vllm.local_layers import LOCAL_FLAGS, served_shape
from kvq_cli.vllm.prefix_store.settings import RAW, StoreSettings
from kvq_cli.vllm.served import CACHE_DTYPE, KEY, ServedMethod
from kvq_cli.vllm.shard import Shard

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ServePlan:
    """A server that can be started. shape, layout: of one of the tensor-parallel `ranks`. source: the model's folder or
    Hub id. shutdown_timeout: seconds that requests in flight have when it is asked to end. flags: vLLM's own.
    store: of prefixes."""

    served: ServedMethod
    shape: ModelShape
    ranks: int
    layout: CacheLayout
    source: str
    name: str
    shutdown_timeout: int
    flags: tuple[str, ...]
    store: StoreSettings | None = None

    def arguments(self) -> list[str]:
        """The arguments of `vllm`."""
        dtype = self.shape.dtype
        words = ["serve", self.source, "--dtype", dtype, "--kv-cache-dtype", CACHE_DTYPE]
        words += ["--block-size", str(self.layout.block_size)]
        words += ["--attention-backend", "CUSTOM"] if self.layout.local is None else LOCAL_FLAGS
        words += ["--shutdown-timeout", str(self.shutdown_timeout)]
        if flag_value(self.flags, "--served-model-name") is None:
            words += ["--served-model-name", self.name]
        config = {**self._additional(), **self.served.additional_config()}
        words += [] if self.store is None else self.store.flags()
        return [*words, "--additional-config", json.dumps(config), *without(self.flags, _OWN)]

    def _additional(self) -> dict[str, Any]:
        given = flag_value(self.flags, "--additional-config")
        return {} if given is None else load_json(given)

    def summary(self) -> str:
        """The sizes of the cache, in words."""
        layout, exact, local = self.layout, self.layout.exact, self.layout.local
        layers = len(self.shape.cached_layers)
        per_token = layout.page_bytes * layers / layout.block_size
        plain = token_bytes(self.shape) * layers
        dtype = self.shape.dtype
        text = (
            f"a block: {layout.block_size} tokens in {layout.page_bytes:,} bytes a layer; {per_token:,.0f} bytes a "
            f"token, {layout.bits(self.shape):.2f} packed bits per number, {plain / per_token:.2f} times fewer than "
            f"{plain:,} in {dtype}"
        )
        if self.ranks > 1:
            text = f"each of {self.ranks} ranks has {self.shape.kv_heads} kv heads; {text}"
        if exact is not None:
            text += (
                f"; in full precision: {exact.sinks} first and up to {exact.recent} newest tokens, {exact.block_size} "
                f"to a block, up to {exact.blocks} blocks a sequence"
            )
        if local is not None:
            most = local.blocks(local.window + local.block_size)
            text = (
                f"{layers} layers see all tokens: {text}; {local.layers} layers see {local.window} tokens, in vLLM's "
                f"own cache, {local.block_size} to a block, up to {most} blocks a sequence"
            )
        if self.store is not None:
            text += f"; {self.store.summary()}"
        return text


#: Flags of vLLM that kvq computes, and may be given to it.
_OWN = (
    "--block-size",
    "--additional-config",
    "--kv-cache-dtype",
    "--attention-backend",
    "--dtype",
    "--shutdown-timeout",
)
_OTHER_WINDOWS = ("it changes which layers of the model have a sliding window", ())
#: As `REFUSED_FLAGS`, of a model with sliding windows.
_REFUSED_BESIDE_WINDOWS = {
    "--attention-config": ("kvq serve sets it for a model with sliding windows", ()),
    "--disable-sliding-window": _OTHER_WINDOWS,
    "--hf-overrides": _OTHER_WINDOWS,
}
#: Without a timeout, vLLM aborts requests in flight and never tells their clients, for whom it waits for ever.
_SHUTDOWN_TIMEOUT = 30


def serve_plan(
    served: ServedMethod,
    config: PretrainedConfig,
    shape: ModelShape,
    source: str,
    name: str,
    flags: Sequence[str],
    store: StoreSettings | None = None,
) -> ServePlan:
    """Check that the method can be served with this model and these flags, of which `check_flags` refuses none. Raises
    UsageError with the reason."""
    check_model(config, name)
    shape = served_shape(served.method, shape)
    ranks = whole_number(flags, "--tensor-parallel-size") or 1
    plans, of_rank = served.plans_of_ranks(shape, ranks), Shard(0, ranks).shape(shape)
    check_plans(served.method, plans)
    additional = flag_value(flags, "--additional-config")
    if additional is not None:
        _check_additional(additional)
    layout = cache_layout(plans, of_rank, whole_number(flags, "--block-size")).of_rank(0, len(shape.cached_layers))
    if layout.local is not None:
        refuse_flags(flags, _REFUSED_BESIDE_WINDOWS)
    if store is not None:
        if layout.local is not None:
            raise UsageError(
                f"--prefix-store: {name} has layers with a sliding window, whose blocks are not stored; leave it out"
            )
        if layout.exact is not None:
            raise UsageError(
                f"--prefix-store: method {served.method.name} keeps tokens in full precision in blocks of their own, "
                "which are not stored; use it without a method, with vLLM's own cache, or with fp16 or turboquant"
            )
        if served.method.name != "fp16" and store.artifact != RAW:
            raise UsageError(
                f"--prefix-store-artifact {store.artifact}: pages of method {served.method.name} hold codes already; "
                "give raw"
            )
    return ServePlan(served, of_rank, ranks, layout, source, name, shutdown_timeout(flags), tuple(flags), store)


def shutdown_timeout(flags: Sequence[str]) -> int:
    """Seconds that requests in flight have."""
    timeout = whole_number(flags, "--shutdown-timeout", least=0)
    return _SHUTDOWN_TIMEOUT if timeout is None else timeout


def whole_number(flags: Sequence[str], name: str, least: int = 1) -> int | None:
    """The value of a flag; None: it is not given. Raises UsageError unless it is a whole number of at least `least`."""
    text = flag_value(flags, name)
    if text is not None and not (text.isdecimal() and int(text) >= least):
        raise UsageError(f"{name} {text}: give a whole number of at least {least}")
    return None if text is None else int(text)


def _check_additional(text: str) -> None:
    try:
        given = load_json(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or KEY in given:
        raise UsageError(f'--additional-config {text}: must be a JSON object without "{KEY}", which kvq serve writes')
