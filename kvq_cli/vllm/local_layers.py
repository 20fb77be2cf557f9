"""Layers with a sliding window: vLLM's own cache and attention, in 16 bits, beside kvq's pages of the other layers.

vLLM gives all layers blocks of one pool, whose pages have the bytes of kvq's: a page of a local layer holds 16, 32 or
64 tokens in 16 bits, the most that fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method, ModelShape

#: Tokens of a block that vLLM's attention backends take, the most first: FlashInfer takes no others.
LOCAL_SIZES = (64, 32, 16)
#: vLLM's flags: kvq's attention for layers that see all tokens, and for those alone kvq's cache.
LOCAL_FLAGS = (
    *("--attention-config.backend_per_kind.full_attention", "CUSTOM"),
    *("--kv-cache-dtype-skip-layers", "sliding_window"),
)


@dataclass(frozen=True)
class LocalBlocks:
    """The blocks of `layers` layers whose queries see `window` tokens, `block_size` tokens each.

    beside: layers that see all tokens.
    """

    layers: int
    window: int
    block_size: int
    beside: int

    @property
    def slots(self) -> int:
        """Layers of which a block of vLLM's pool has a page: vLLM's choice, by the layers of each kind."""
        fewer, more = sorted((self.layers, self.beside))
        return more if more < 1.5 * fewer else fewer

    def blocks(self, tokens: int) -> int:
        """Count the blocks of a sequence of `tokens` tokens while it decodes, at most: those of the tokens that it
        sees, for each `slots` layers."""
        seen = min(-(-tokens // self.block_size), -(-self.window // self.block_size) + 1)
        return -(-self.layers // self.slots) * seen


def served_shape(method: Method, shape: ModelShape) -> ModelShape:
    """Return `shape`, whose `cached_layers` are those that kvq's pages hold: with a sliding window, `local=16bit` is
    served.

    Raises UsageError for `local=packed`, and where vLLM would not give these layers one list of blocks.
    """
    if not shape.windows:
        return shape
    if method.local == "packed" and method.nominal_bits < 16:
        raise UsageError(
            f"{method.name}: local=packed is not served, layers with a sliding window stay in vLLM's own 16-bit cache: "
            "set local=16bit, or use `kvq generate`"
        )
    layers = tuple(layer for layer in shape.cached_layers if shape.window(layer) is None)
    if not layers:
        raise UsageError("all layers have a sliding window, so that none is left to compress: use `kvq generate`")
    local = shape.layers - shape.windows.count(None)
    if LocalBlocks(local, 0, 1, len(layers)).slots < len(layers):
        raise UsageError(
            f"{len(layers)} layers see all tokens and {local} have a sliding window: with so few of these, vLLM gives "
            "the others several lists of blocks, which kvq does not serve: use `kvq generate`"
        )
    return replace(shape, attention=layers)


def local_blocks(shape: ModelShape, page_bytes: int, token_bytes: int) -> LocalBlocks | None:
    """Return the blocks of local layers beside pages of `page_bytes`; None: there are no such layers. block_size is 0
    where a page has no room for the least of `LOCAL_SIZES`.

    shape: a `served_shape`. token_bytes: of one token in one layer, in the model's dtype.
    """
    windows = [window for window in shape.windows if window is not None]
    if not windows:
        return None
    tokens = next((size for size in LOCAL_SIZES if size * token_bytes <= page_bytes), 0)
    return LocalBlocks(len(windows), max(windows), tokens, len(shape.cached_layers))
