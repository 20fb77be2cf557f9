"""A server with vLLM's own cache and attention, which stores prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvq_cli import packaged
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.models import configured_shape, model_config, model_source
from kvq_cli.vllm.checks import REFUSED_FLAGS, check_model, refuse_flags
from kvq_cli.vllm.command import shutdown_timeout, whole_number
from kvq_cli.vllm.flags import flag_value, without
from kvq_cli.vllm.layout import token_bytes
from kvq_cli.vllm.prefix_store.settings import RAW, StoreSettings
from kvq_cli.vllm.shard import check_ranks

#: Tokens of a block unless --block-size is given: a file for each 16 tokens, vLLM's own choice, would be small.
BLOCK_SIZE = 64
_OWN = ("--block-size", "--dtype", "--shutdown-timeout")
_PARALLEL = ("--pipeline-parallel-size", "--decode-context-parallel-size", "--prefill-context-parallel-size")
_REFUSED = {
    **{name: REFUSED_FLAGS[name] for name in (*_PARALLEL, "--enable-sleep-mode")},
    "--kv-cache-dtype": ("it stores keys and values of the model's dtype", ("auto",)),
    "--enable-lora": ("hashes of blocks name an adapter, not its weights", ()),
    "--kv-transfer-config": ("it is a connector itself", ()),
    "--kv-offloading-size": ("it is a connector itself", ()),
    **dict.fromkeys(
        ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens"),
        ("it does not support speculative decoding", ()),
    ),
}


@dataclass(frozen=True)
class StockPlan:
    """A server that can be started. shape: of the model. source: its folder or Hub id. flags: vLLM's own."""

    shape: ModelShape
    source: str
    name: str
    block_size: int
    shutdown_timeout: int
    flags: tuple[str, ...]
    store: StoreSettings

    def arguments(self) -> list[str]:
        """Return the arguments of `vllm`."""
        words = ["serve", self.source, "--dtype", self.shape.dtype, "--block-size", str(self.block_size)]
        words += ["--shutdown-timeout", str(self.shutdown_timeout)]
        if flag_value(self.flags, "--served-model-name") is None:
            words += ["--served-model-name", self.name]
        return [*words, *self.store.flags(), *without(self.flags, _OWN)]

    def summary(self) -> str:
        """Describe the cache and the store, in words."""
        exact = token_bytes(self.shape) * self.shape.layers * self.block_size
        return (
            f"the cache is vLLM's own, in {self.shape.dtype}, without compression; a block: {self.block_size} tokens, "
            f"{exact:,} bytes; {self.store.summary()}"
        )


def stock_plan(
    store: StoreSettings, model: str, dtype: str, trust_remote_code: bool, flags: Sequence[str]
) -> StockPlan:
    """Check that prefixes of this model can be stored with these flags. Raises UsageError with the reason."""
    refuse_flags(flags, _REFUSED, "the prefix store")
    packaged.check_dtype(model, dtype)
    check_model(model_config(model, trust_remote_code), model)
    shape = configured_shape(model, trust_remote_code=trust_remote_code)
    if shape.windows:
        raise UsageError(f"--prefix-store: {model} has layers with a sliding window, whose blocks are not stored")
    check_ranks(shape, whole_number(flags, "--tensor-parallel-size") or 1)
    shape = shape if dtype == "auto" else replace(shape, dtype=dtype)
    size = whole_number(flags, "--block-size") or BLOCK_SIZE
    if store.artifact != RAW and size % 16:
        raise UsageError(f"--block-size {size}: klt packs 16 tokens together; use a multiple, such as {BLOCK_SIZE}")
    return StockPlan(shape, model_source(model), model, size, shutdown_timeout(flags), tuple(flags), store)
