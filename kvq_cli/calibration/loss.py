"""The loss's gradient at the output of the decoder, a few tokens at a time: all logits of a sample and their gradients
would take more memory than its activations."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from kvq_cli.attention.capture_points import decoder_of
from kvq_cli.upcast import upcast_products

#: Tokens whose logits exist at a time.
TOKENS = 128


def hidden_gradient(model: PreTrainedModel, output: ModelOutput, ids: Tensor) -> Tensor:
    """d loss / d `output.last_hidden_state`, which is what the decoder of `model` returned for `ids` `[1, tokens]`.

    The loss is the sum of the next-token cross entropies, computed in float32 from the model's own logits: its output
    layer, scaling and soft-capping included. Weights are frozen.
    """
    hidden = output["last_hidden_state"].detach()
    decoder = decoder_of(model)
    gradient, decoded = torch.zeros_like(hidden), _Returns(decoder)
    head = _with_decoder(model, decoder, decoded)
    with upcast_products(head):
        for first in range(0, ids.shape[1] - 1, TOKENS):
            tokens = slice(first, min(first + TOKENS, ids.shape[1] - 1))
            part = hidden[:, tokens].clone().requires_grad_()
            decoded.output = type(output)(**{**output, "last_hidden_state": part})
            logits = head(input_ids=ids[:, tokens], use_cache=False).logits[0]
            loss = F.cross_entropy(logits.float(), ids[0, tokens.start + 1 : tokens.stop + 1], reduction="sum")
            if loss.requires_grad:  # else the output layer has no backward pass
                gradient[:, tokens] = torch.autograd.grad(loss, part)[0]
    return gradient


class _Returns(nn.Module):
    """Returns `output`, whatever it is called with. Other attributes are the decoder's: Falcon-H1 multiplies its logits
    by one."""

    output: ModelOutput

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._decoder = (decoder,)  # no module of this one

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_decoder"][0], name)

    def forward(self, *_args: Any, **_kwargs: Any) -> ModelOutput:
        return self.output


def _with_decoder(module: nn.Module, decoder: nn.Module, other: nn.Module) -> nn.Module:
    """`module` with `other` in the place of `decoder`. All parts are shared but those that contain it, so that other
    threads may run `module` meanwhile."""
    if module is decoder:
        return other
    if not any(part is decoder for part in module.modules()):
        return module
    new = copy.copy(module)
    new._modules = {
        name: _with_decoder(part, decoder, other) if part else part for name, part in module._modules.items()
    }
    return new
