"""Which layers the kernels of kvq_kernels support, and the conversion of a stream's tensors to kernel arguments.

Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvq_kernels.decode_attention import Codebook, Dense, Outliers, Pages, PerHead, Side, Uniform
from torch import Tensor

from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.prompt_stream import PromptStream
from kvq_cli.cache.stream import Stream, StreamReader
from kvq_cli.codecs.base import AnyCodec, Part, PromptCodec
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.gear import GearCodec
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.nearest import MAX_ENTRIES
from kvq_cli.codecs.normalized import NormalizedCodec
from kvq_cli.codecs.outliers import OutlierCodec
from kvq_cli.codecs.per_head import PerHeadCodec
from kvq_cli.codecs.per_token import PerTokenCodec
from kvq_cli.codecs.rotated import RotatedCodec
from kvq_cli.codecs.salient import SalientCodec
from kvq_cli.codecs.signed import SignedCodec
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.methods.base import LayerPlan

#: The narrowest head that kernels are tested for; they pad it to twice as many channels.
MIN_HEAD_DIM = 16
#: Tokens of a codebook's block: a tile is at most as long as the tables of cosines, 16 codes of 8 tokens.
MAX_BLOCK_TOKENS = 8
#: Why kernels cannot read the storage of a codec.
_REASONS = {
    GearCodec: "a low-rank approximation and outliers are kept beside the codes",
    SalientCodec: "tokens of the prompt have different numbers of bits",
    RotatedCodec: "channels are rotated before they are packed",
    TransformCodec: "codes stand for components of a transform",
}


def unsupported(plan: LayerPlan, rotation: Rotation) -> str | None:
    """Why the kernels cannot read a layer whose keys and values are kept by `plan`; None: they can."""
    if rotation.head_dim < MIN_HEAD_DIM:
        return f"head_dim={rotation.head_dim} is below {MIN_HEAD_DIM}"
    sinks = plan.keys.window.sinks, plan.values.window.sinks
    if sinks[0] != sinks[1]:
        return f"keys have {sinks[0]} sinks and values {sinks[1]}"
    normed = isinstance(plan.keys.codec, NormalizedCodec)
    if normed and plan.keys.source == "pre_rope" and rotation.style != "none":
        return "keys are divided by a norm before RoPE"  # which a query after RoPE cannot take in
    if isinstance(plan.values.codec, NormalizedCodec):
        return "values are divided by a norm"
    for name, codec in (("keys", plan.keys.codec), ("values", plan.values.codec)):
        if why := _unread(_stored_as(codec)):
            return f"of the {name} {why}"
    return None


def _stored_as(codec: AnyCodec) -> AnyCodec:
    """The plain codec whose parts `codec` stores, if there is one."""
    return (codec.stored_as or codec) if isinstance(codec, PromptCodec) else codec


def _unread(codec: AnyCodec) -> str | None:
    """Why the kernels cannot read what `codec` packs."""
    if isinstance(codec, (PerTokenCodec, OutlierCodec)):
        return _unread(codec.base)
    if isinstance(codec, PerHeadCodec):
        return next(filter(None, (_unread(member) for member, _ in codec.members.values())), None)
    if isinstance(codec, SignedCodec):
        if codec.hybrid != "no" and codec.group != 32:
            return f"zero-points are in words of {codec.group} bits, not 32 (use group=32)"
        return None
    if isinstance(codec, CodebookCodec):
        return _unread_codebook(codec)
    if isinstance(codec, (IdentityCodec, UniformCodec)):
        return None
    return _REASONS.get(type(codec), f"the storage of {type(codec).__name__} is not read by a kernel")


def _unread_codebook(codec: CodebookCodec) -> str | None:
    tokens, constants = codec.block[0], codec.constants()
    if codec.centroids.shape[2] > MAX_ENTRIES:
        return "codes have 16 bits"
    if tokens & (tokens - 1) or tokens > MAX_BLOCK_TOKENS:
        return f"codes are of {tokens} tokens, not 1, 2, 4 or {MAX_BLOCK_TOKENS}"
    if ("mean" in constants) != ("std" in constants):
        return "a mean is kept without a deviation"
    return None


def norm_of(stream: StreamReader) -> Tensor | None:
    """The norm by which the stream's packed numbers are divided, `[rows, kv_heads, head_dim]` float32."""
    return stream.state.get("norm") if isinstance(stream, PromptStream) else None


def side(stream: StreamReader, count: Tensor) -> Side:
    """The kernel arguments of a stream. count: packed tokens of each row, int32 `[rows]`.

    Nothing is copied unless the store has grown beyond its reserved room.
    """
    if not isinstance(stream, Stream):
        raise TypeError("keys or values rematerialized from layer inputs are not stored")
    sinks, ring = stream.sinks if stream.window.sinks else None, stream.ring
    packed = stream.store.whole()
    if packed is None:  # before the first flush there are no codes: `count` is 0, and the tensor is not read
        return Side(Dense(ring), count, sinks, ring, norm=norm_of(stream))
    return side_of(stream.codec, packed.parts, count, sinks, ring, norm=norm_of(stream))


def side_of(
    codec: AnyCodec,
    stored: Mapping[str, Part],
    count: Tensor,
    sinks: Tensor | None,
    ring: Tensor | None,
    *,
    norm: Tensor | None = None,
    pages: Pages | None = None,
) -> Side:
    """The kernel arguments of tensors that `codec` packs into; the others are fields of `Side`."""
    outliers = None
    if "outlier_index" in stored:
        index, value = (stored[name] for name in ("outlier_index", "outlier_value"))
        start = stored.get("outlier_start")
        outliers = Outliers(index.tensor, value.tensor, index.unit, None if start is None else start.tensor)
    packed = _packed(_stored_as(codec), {name: part.tensor for name, part in stored.items()})
    return Side(packed, count, sinks, ring, outliers, norm, pages)


def _packed(codec: AnyCodec, parts: Mapping[str, Tensor], *per_token: Tensor) -> Dense | Uniform | Codebook | PerHead:
    """The parts of `codec` as kernel arguments. per_token: scales and zero-points applied after decoding."""
    if isinstance(codec, OutlierCodec):
        return _packed(codec.base, parts)
    if isinstance(codec, PerTokenCodec):
        return _packed(codec.base, parts, *(parts[name].squeeze(3) for name in ("scale", "zero")))
    if isinstance(codec, PerHeadCodec):
        members = (
            _alike(member, parts_of_member(parts, name), *per_token) for name, (member, _) in codec.members.items()
        )
        return PerHead(tuple(members), tuple(heads for _, heads in codec.members.values()))
    return _alike(codec, parts, *per_token)


def _alike(codec: AnyCodec, parts: Mapping[str, Tensor], *per_token: Tensor) -> Dense | Uniform | Codebook:
    """`_packed` of a codec that stores all its heads in the same format."""
    if isinstance(codec, IdentityCodec):
        return Dense(parts["raw"])
    if isinstance(codec, CodebookCodec):
        return _codebook(codec, parts["codes"], *per_token)
    if not isinstance(codec, UniformCodec):
        raise TypeError(f"the storage of {type(codec).__name__} is not read by a kernel")
    level, sign, hybrid = 0, None, False
    if isinstance(codec, SignedCodec):
        hybrid = codec.hybrid != "no"
        if codec.sign == "inside":
            level = 2 ** (codec.bits - 1) - 1
        else:
            sign = parts["sign_or_zero" if hybrid else "sign"]
    layout = codec.bits, codec.axis, codec.group
    return Uniform(parts["codes"], parts["scale"], *layout, parts.get("zero"), level, sign, hybrid)


def parts_of_member(parts: Mapping[str, Tensor], member: str) -> dict[str, Tensor]:
    """The parts of one member of a `PerHeadCodec`."""
    return {name.removeprefix(f"{member}."): x for name, x in parts.items() if name.startswith(f"{member}.")}


def _codebook(codec: CodebookCodec, codes: Tensor, *per_token: Tensor) -> Codebook:
    constants = codec.constants()
    stats = [constants[name].squeeze(1) if name in constants else None for name in ("mean", "std")]
    return Codebook(codes, constants["centroids"], codec.block, *stats, *per_token)
