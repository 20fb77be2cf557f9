"""Reasons to refuse a method or a model before an engine starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import PromptCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method
from kvq_cli.vllm.flags import flag_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_plans(method: Method, plans: Sequence[LayerPlan]) -> None:
    """Raise UsageError for a method that cannot be paged."""
    for plan in plans:
        if plan.joins_layers:
            raise UsageError(
                f"method {method.name} cannot be served: its codes are of all layers together, and vLLM gives each "
                "layer a cache of its own: use `kvq generate`"
            )
        if plan.cross_layer is not None or plan.keys.source == "input":
            raise UsageError(
                f"method {method.name} cannot be served: it caches layer inputs, of which vLLM passes none to its "
                "attention"
            )
        if any(isinstance(stream.codec, PromptCodec) for stream in plan.kept):
            mend = "; use --set norm=off, with a mode other than hybrid_prefill" if method.name == "innerq" else ""
            raise UsageError(
                f"method {method.name} cannot be served with these options: its codes depend on the whole prompt, but "
                f"vLLM's blocks may depend on the tokens before their end alone{mend}"
            )


def check_model(config: PretrainedConfig, name: str) -> None:
    """Raise UsageError for a model whose attention kvq does not page."""
    from kvq_cli.layer_kinds import has_states
    from kvq_cli.models import text_config

    text = text_config(config)
    if getattr(text, "kv_lora_rank", None):
        raise UsageError(f"{name} has multi-head latent attention (MLA), whose latents kvq does not compress")
    if text.model_type == "gpt_oss":
        raise UsageError(f"{name} has sink logits, which kvq does not serve: use `kvq generate`")
    if has_states(text):
        raise UsageError(f"{name} has layers with other states than keys and values: use `kvq generate`")
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{name} is not a decoder-only model")


#: vLLM's flags with which kvq does not serve -> the reason, and the values that change nothing.
REFUSED_FLAGS = {
    "--pipeline-parallel-size": ("all layers must be in one process", ("1",)),
    "--decode-context-parallel-size": ("a sequence's tokens are packed together", ("1",)),
    "--prefill-context-parallel-size": ("a sequence's tokens are packed together", ("1",)),
    "--kv-transfer-config": ("blocks of exact tokens cannot be transferred; for prefixes, see --prefix-store", ()),
    "--kv-offloading-size": ("blocks of exact tokens cannot be transferred", ()),
    "--kv-cache-dtype-skip-layers": ("the method says how each layer is stored, and kvq serve what vLLM stores", ()),
    "--enable-sleep-mode": ("sleep level 2 discards the memory in which codebooks and rotations lie", ()),
    "--disable-hybrid-kv-cache-manager": ("exact tokens have blocks of their own", ()),
}
#: Flags by which vLLM loads another model than the one that an artifact is compared with.
OTHER_MODEL = ("--revision", "--hf-overrides", "--hf-config-path")


def check_flags(flags: Sequence[str], artifact: bool = False) -> None:
    """Raise UsageError for flags of vLLM with which kvq does not serve, and for those that `kvq serve` sets.

    artifact: whether the method has one, which belongs to one model.
    """
    refuse_flags(flags, REFUSED_FLAGS)
    for name, value in _given(flags):
        if artifact and name in OTHER_MODEL:
            raise UsageError(
                f"{name}: kvq compares the artifact with the model without it; give --model the folder of the model "
                "that the artifact was calibrated for"
            )
        if name in ("--kv-cache-dtype", "--attention-backend"):
            raise UsageError(f"{name} {value}: kvq serve sets it; choose a method with --method and --bits")


def refuse_flags(flags: Sequence[str], refused: Mapping[str, tuple[str, tuple[str, ...]]], who: str = "kvq") -> None:
    """Raise UsageError for flags that `who` does not support. refused: as `REFUSED_FLAGS`."""
    for name, value in _given(flags):
        if name in refused and value not in refused[name][1]:
            raise UsageError(f"{name} is not supported by {who}: {refused[name][0]}; remove it")


def _given(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of each word."""
    for i, word in enumerate(flags):
        # vLLM sets single fields with a dot: -sc.method=ngram.
        name, (_, equals, value) = flag_name(word.partition("=")[0].partition(".")[0]), word.partition("=")
        yield name, value if equals else next(iter(flags[i + 1 : i + 2]), "")
