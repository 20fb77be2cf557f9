"""What transformers calls while a pass of an attached model runs: its attention function and its mask function."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvq_cli.attention.scores import FORMS, PLAIN, ScoreForm
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import stalls
from kvq_cli.errors import UsageError

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached

#: Attention arguments that do not change the result.
_HARMLESS = {"use_cache", "position_ids", "cache_position", "output_hidden_states", "return_dict", "sliding_window"}


@dataclass(frozen=True)
class Pass:
    """What an attention module computes with during one forward pass. done: it has computed."""

    layer: CompressedLayer
    attached: Attached
    done: bool = False


#: Of each attention module, the pass that runs.
AHEAD: WeakKeyDictionary[nn.Module, Pass] = WeakKeyDictionary()


def mask(*args, q_length: int, device: torch.device | str = "cpu", **kwargs) -> Tensor | None:
    """transformers' mask interface. A step of the compressed cache needs no mask: on a GPU none is made, since whether
    there are pads would be read back from it."""
    if AHEAD and stalls(torch.device(device), q_length):
        return None
    return sdpa_mask(*args, q_length=q_length, device=device, **kwargs)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `[batch, heads, tokens, head_dim]` -> `[batch, tokens, heads, head_dim]`."""
    _refuse_unknown(module, dropout, kwargs)
    form = FORMS[module] = ScoreForm(softcap, s_aux) if softcap is not None or s_aux is not None else PLAIN
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def uncompressed() -> tuple[Tensor, None]:
        if form is PLAIN:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return form.attention(query, key, value, attention_mask, scaling), None

    ahead = AHEAD.get(module)
    if ahead is None:
        return uncompressed()
    if ahead.done:
        raise UsageError(f"{type(module).__name__} computes attention twice in a pass, of numbers that are cached once")
    layer, attached = ahead.layer, ahead.attached
    AHEAD[module] = replace(ahead, done=True)
    forward = layer.forward
    if kwargs.get("sliding_window") != layer.sliding_window:
        raise UsageError(f"layer {layer.index}: its sliding window is not the one that the model's config announces")
    forward.check_mask(attention_mask, layer.sliding_window)
    layer.score_form = form
    layer.absorb(query)
    compressed = attached.prefill == "compressed"
    if forward.is_first and not compressed:
        layer.release()
        return uncompressed()
    if forward.columns == 1:
        out = attached.backend.decode_attention(query, layer, scaling)
    else:
        out = attached.backend.prefill_attention(query, key, value, layer, scaling, compressed)
    layer.release()
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(module: nn.Module, dropout: float, kwargs: dict) -> None:
    """UsageError for attention that is more than softmax(scaling q K^T + mask) V in a form that `ScoreForm` knows."""
    if dropout:
        raise UsageError("kvq computes no attention dropout: call model.eval() first")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UsageError(f"{type(module).__name__}: attention that is not causal is not supported")
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _HARMLESS and name != "is_causal":
            raise UsageError(f"{type(module).__name__} passes {name} to its attention, which kvq does not compute")
