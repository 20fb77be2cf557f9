"""ZipCache: more bits for the tokens that receive more attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from kvq_cli.codecs import bits as bitpack
from kvq_cli.codecs.base import (
    TILE,
    Codec,
    Packed,
    Part,
    Prompt,
    PromptCodec,
    State,
    refuse_unless,
    side_dtype,
    to_side,
)
from kvq_cli.codecs.layout import Layout, PartSpec, TensorSpec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Fraction of a prompt's queries that are probes: the newest, and as many random ones.
PROBES = 0.05

Side = Literal["keys", "values"]


class SalientCodec(PromptCodec):
    """In each chunk of tokens of a head, the fraction `ratio` of most salient tokens has `high` bits, the others `low`.

    keys:   groups are the salient tokens of a channel, and the others of a channel.
    values: divided by c_i = sqrt(max |V_i|) of their channel; groups are the channels of a token.

    The prompt is one chunk, its saliency `prompt_saliency`; later chunks have `chunk` tokens, and their saliency is
    given. A code's lower `low` bits lie with its token; the upper bits of salient tokens, in their order, apart.

    Parts: `codes` `[B, H, T, words]`, unit 1; `salient` int32 `[B, H, T / chunk, words]`, one bit per token, and in the
    prompt `before` int32 `[B, H, T / chunk, 1]`, the salient tokens before a chunk, both with unit `chunk`; of values
    `scale` and `zero` `[B, H, T, 1]`, unit 1.
    State of the prompt's rows (then the same for `[B, H, T / chunk, ...]` as parts with unit `chunk`): `upper` int32
    `[rows, H, salient tokens, words]`; of keys `key_scale` and `key_zero` `[rows, H, 2, D]`, salient tokens' second; of
    values `norm` `[rows, H, D]`.
    """

    stores_prompt_apart = needs_saliency = True
    unread_by_kernels = "tokens of the prompt have different numbers of bits"

    def __init__(
        self,
        side: Side,
        low: int,
        high: int,
        ratio: float,
        chunk: int,
        head_dim: int,
        dtype: torch.dtype | str,
        seed: int = 0,
    ) -> None:
        self._upper = high - low
        if self._upper and self._upper not in bitpack.SPLIT:
            raise UsageError(f"bits={low} beside high={high}: the difference must be 0, 1, 2, 3, 4 or 8 bits")
        self.side, self.low, self.high, self.ratio, self.seed = side, low, high, ratio, seed
        self.block_tokens, self.head_dim = chunk, head_dim
        self.nominal_bits = low + ratio * (high - low)
        self._dtype = side_dtype(dtype)

    def count(self, tokens: int) -> int:
        """How many of `tokens` tokens are salient."""
        return round(self.ratio * tokens)

    def encode_prompt(self, x: Tensor, prompt: Prompt, first: int) -> tuple[Packed, State]:
        saliency = prompt_saliency(prompt, self.seed)[:, :, first : first + x.shape[2]]
        salient = self._top(saliency.unsqueeze(2))
        tokens, chunks = self._quantize(x.unsqueeze(2), salient)
        marks = salient.unflatten(3, (-1, self.block_tokens)).squeeze(2)
        counts = marks.sum(dim=3, dtype=torch.int32, keepdim=True)
        before = {"salient": bitpack.pack(marks, 1), "before": counts.cumsum(2, dtype=torch.int32) - counts}
        return self._packed(tokens, before), {name: x.squeeze(2) for name, x in chunks.items()}

    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        parts = self._token_parts(heads, dim) | {
            "salient": PartSpec(heads, self.block_tokens, (bitpack.words_per_row(1, self.block_tokens),), "int32"),
            "before": PartSpec(heads, self.block_tokens, (1,), "int32"),
        }
        chunk = self._chunk_entries(dim, self.count(tokens)).items()
        return Layout(parts, state={name: TensorSpec((1, heads, *entry), kind) for name, (entry, kind) in chunk})

    def chunk_layout(self, heads: int, dim: int) -> Layout:
        """The parts of chunks after the prompt."""
        unit = self.block_tokens
        salient = PartSpec(heads, unit, (bitpack.words_per_row(1, unit),), "int32")
        chunk = self._chunk_entries(dim, self.count(unit)).items()
        parts = {name: PartSpec(heads, unit, entry, kind) for name, (entry, kind) in chunk}
        return Layout(self._token_parts(heads, dim) | {"salient": salient} | parts)

    def _token_parts(self, heads: int, dim: int) -> dict[str, PartSpec]:
        """Parts with an entry for each token."""
        parts = {"codes": PartSpec(heads, 1, (bitpack.words_per_row(self.low, dim),), "int32")}
        if self.side == "values":
            parts |= {name: PartSpec(heads, 1, (1,), self._dtype) for name in ("scale", "zero")}
        return parts

    def _chunk_entries(self, dim: int, salient: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of what a chunk with so many salient tokens has, or the prompt."""
        entries: dict[str, tuple[tuple[int, ...], str]] = {}
        if self.side == "values":
            entries["norm"] = ((dim,), self._dtype)
        if salient and self._upper:
            entries["upper"] = ((salient, bitpack.words_per_row(self._upper, dim)), "int32")
        if self.side == "keys":
            entries |= dict.fromkeys(("key_scale", "key_zero"), ((2, dim), self._dtype))
        return entries

    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        return _ChunkCodec(self, state, saliency)

    def encode_chunks(self, x: Tensor, saliency: Tensor) -> Packed:
        """Pack chunks of tokens after the prompt; `saliency` `[batch, kv_heads, tokens]`."""
        salient = self._top(saliency.unflatten(2, (-1, self.block_tokens)))
        tokens, chunks = self._quantize(x.unflatten(2, (-1, self.block_tokens)), salient)
        return self._packed(tokens, {"salient": bitpack.pack(salient, 1), **chunks})

    def check_state(self, state: State) -> None:
        _check_sides(state)

    def check_parts(self, packed: Packed) -> None:
        """`Codec.check` of the prompt or of later chunks: as many tokens are salient as are counted."""
        part = {name: part.tensor for name, part in packed.parts.items()}
        counts = bitpack.unpack(part["salient"], 1, self.block_tokens).sum(dim=3)
        if "before" in part:
            before = part["before"].squeeze(3)
            refuse_unless(before == counts.cumsum(2) - counts, "before")
            refuse_unless(counts.sum(dim=2) == self.count(packed.tokens), "salient")
        else:
            refuse_unless(counts == self.count(self.block_tokens), "salient")
        _check_sides(part)

    def restore(self, packed: Packed, state: State, dtype: torch.dtype) -> Tensor:
        """Unpack the prompt, with the state of its rows, or later chunks, which need none."""
        part = {name: part.tensor for name, part in packed.parts.items()}
        chunk = part | {name: x.unsqueeze(2) for name, x in state.items()} if "before" in part else part
        salient = bitpack.unpack(part["salient"], 1, self.block_tokens).bool()
        codes = bitpack.unpack(part["codes"], self.low, self.head_dim)
        if "upper" in chunk and chunk["upper"].numel():
            codes |= self._upper_bits(chunk["upper"], salient, part.get("before"))
        x = codes.float()
        if self.side == "values":
            x = self._uniform(0, 1).dequantize(x, part).unflatten(2, salient.shape[2:])
            x.mul_(chunk["norm"].float().unsqueeze(3))
        else:
            x, which = x.unflatten(2, salient.shape[2:]), salient.unsqueeze(4)
            for name, step in (("key_scale", x.mul_), ("key_zero", x.add_)):
                others, salients = chunk[name].float().split(1, dim=3)
                step(torch.where(which, salients, others))
        return x.flatten(2, 3).to(dtype)

    def _quantize(self, x: Tensor, salient: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`[B, H, n, C, D]` and `[B, H, n, C]` bool, as many true in each chunk -> parts by token, `[B, H, n C, ...]`,
        and by chunk, `[B, H, n, ...]`."""
        x, parts = x.float(), {}
        if self.side == "values":
            norm = to_side(x.abs().amax(dim=3).sqrt(), self._dtype)
            parts["norm"] = norm.masked_fill_(norm == 0, 1)
            x = x / parts["norm"].float().unsqueeze(3)
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        kind = getattr(torch, self._dtype)
        sides = [x.new_zeros(self._side_shape(x), dtype=kind) for _ in ("scale", "zero")]
        # Chunk by chunk the other tokens, then the salient ones, both in their order.
        order, count = salient.to(torch.uint8).sort(dim=3, stable=True).indices, self.count(salient.shape[3])
        for which, places in enumerate(order.split((order.shape[3] - count, count), dim=3)):
            if not places.shape[3]:
                continue
            places = places.unsqueeze(4)
            group = x.gather(3, places.expand(*places.shape[:4], x.shape[4]))
            group_codes, group_sides = self._uniform(which, group.shape[3]).quantize(group.flatten(2, 3))
            codes.scatter_(3, places.expand(group.shape), group_codes.view(group.shape))
            for side, name in zip(sides, ("scale", "zero"), strict=True):
                if self.side == "values":
                    side.scatter_(3, places, group_sides[name].view(places.shape))
                else:
                    side[:, :, :, which] = group_sides[name]
            if which and self._upper:
                parts["upper"] = bitpack.pack(group_codes.view(group.shape) >> self.low, self._upper)
        by_token = {"codes": bitpack.pack(codes.flatten(2, 3) & (2**self.low - 1), self.low)}
        if self.side == "values":
            by_token |= {"scale": sides[0].flatten(2, 3), "zero": sides[1].flatten(2, 3)}
        else:
            parts |= {"key_scale": sides[0], "key_zero": sides[1]}
        return by_token, parts

    def _side_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of scales and zero-points of `[B, H, n, C, D]`: one per token, or two per channel."""
        return (*x.shape[:4], 1) if self.side == "values" else (*x.shape[:3], 2, x.shape[4])

    def _uniform(self, salient: int, tokens: int) -> UniformCodec:
        """The quantizer of the `tokens` salient tokens of a chunk, or of its others."""
        bits = self.high if salient else self.low
        if self.side == "values":
            return UniformCodec(bits, "token", self.head_dim, self.head_dim, self._dtype)
        return UniformCodec(bits, "channel", tokens, self.head_dim, self._dtype)

    def _upper_bits(self, upper: Tensor, salient: Tensor, before: Tensor | None) -> Tensor:
        """Upper bits in their place, `[B, H, n C, D]` uint8, 0 of tokens that are not salient. `upper` as stored,
        `[B, H, n, salient tokens, words]`, or the whole prompt's, n = 1, of which `before` lie before each chunk."""
        if before is None:
            before = torch.arange(upper.shape[2], device=upper.device).mul_(upper.shape[3]).unsqueeze(1)
        place = (salient.cumsum(3) + before - 1).clamp_(min=0).flatten(2, 3).unsqueeze(3)
        upper = upper.flatten(2, 3)
        words = upper.gather(2, place.clamp_(max=upper.shape[2] - 1).expand(*place.shape[:3], upper.shape[3]))
        bits = bitpack.unpack(words, self._upper, self.head_dim) << self.low
        return bits.mul_(salient.flatten(2).unsqueeze(3))

    def _top(self, saliency: Tensor) -> Tensor:
        """True for the `count` largest of each last dimension, the earlier of equals."""
        best = saliency.sort(dim=-1, descending=True, stable=True).indices[..., : self.count(saliency.shape[-1])]
        return torch.zeros_like(saliency, dtype=torch.bool).scatter_(-1, best, True)

    def _packed(self, by_token: Mapping[str, Tensor], by_chunk: Mapping[str, Tensor]) -> Packed:
        parts = {name: Part(x, 1) for name, x in by_token.items()}
        parts |= {name: Part(x, self.block_tokens) for name, x in by_chunk.items()}
        return Packed(by_token["codes"].shape[2], parts)


class _ChunkCodec(Codec):
    """`salient` after a prompt that left `state`, for tokens that receive the attention `saliency`."""

    def __init__(self, salient: SalientCodec, state: State, saliency: Tensor | None) -> None:
        self._salient, self._state, self._saliency = salient, state, saliency
        self.block_tokens, self.nominal_bits = salient.block_tokens, salient.nominal_bits

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return self._salient.chunk_layout(heads, dim)

    def check(self, packed: Packed) -> None:
        self._salient.check_parts(packed)

    def _encode(self, x: Tensor) -> Packed:
        if self._saliency is None:
            raise ValueError("tokens after the prompt are packed by their saliency, which is not given")
        return self._salient.encode_chunks(x, self._saliency)

    encode = _encode  # all at once: the saliency is that of all tokens of `x`

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self._salient.restore(packed, self._state, dtype)


def _check_sides(tensors: Mapping[str, Tensor]) -> None:
    """Raise KvqError for negative scales, and norms that are not positive."""
    for name, side in tensors.items():
        if name in ("scale", "key_scale"):
            refuse_unless(side >= 0, name)
        elif name == "norm":
            refuse_unless(side > 0, name)


def prompt_saliency(prompt: Prompt, seed: int) -> Tensor:
    """Mean attention that a token receives from the probes that can see it: float32 `[rows, kv_heads, tokens]`.

    sum_k A_ki / nnz(A_:i), summed over the query heads of a kv head; the rows k of the attention matrix A are the
    newest 5% of the queries and as many random earlier ones. As in `attention_received`, A is that of full attention
    with scores q k / sqrt(head_dim), whatever window or scaling the model has.
    """
    keys, queries = prompt.keys.float(), prompt.queries
    heads, tokens, dim = keys.shape[1:]
    newest, random = max(1, int(PROBES * tokens)), int(PROBES * tokens)
    drawn = torch.randperm(tokens - newest, generator=torch.Generator().manual_seed(seed))[:random]
    probes = torch.cat([drawn.sort().values, torch.arange(tokens - newest, tokens)]).to(keys.device)
    place, received = torch.arange(tokens, device=keys.device), keys.new_zeros(keys.shape[:3])
    together = max(1, TILE // (len(keys) * queries.shape[1] * tokens))
    for some in probes.split(together):
        received += attention_received(queries[:, :, some], keys, place > some.unsqueeze(1))
    return received / (probes.unsqueeze(1) >= place).sum(dim=0)


def attention_received(queries: Tensor, keys: Tensor, hidden: Tensor | None = None) -> Tensor:
    """softmax(q K^T / sqrt(head_dim)) summed over queries and the query heads of a kv head.

    `[rows, query_heads, probes, head_dim]`, `[rows, kv_heads, tokens, head_dim]` and `[probes, tokens]`, True where not
    seen -> `[rows, kv_heads, tokens]`, float32.
    """
    grouped = queries.float().unflatten(1, (keys.shape[1], -1))
    scores = grouped @ keys.float().mT.unsqueeze(2) * keys.shape[3] ** -0.5
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    return scores.softmax(dim=-1).sum(dim=(2, 3))
