"""How the compiled CPU kernels read a stream: the C structures of its codec, its rotation and its pieces."""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.rows import Run
from kvq_cli.cache.store import Segment
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.native import library as native
from kvq_cli.native.library import DTYPES, TURNS, Piece, Turn


class Format:
    """A codec as the kernels see it; this one is the identity. Subclasses are below.

    codec: the C structure; the tensors that it points to are kept in `_tensors`.
    """

    kind = native.EXACT
    part = "raw"

    def __init__(self, codec: Codec) -> None:
        self.codec, self._tensors = native.Codec(), []

    @staticmethod
    def fits(codec: Codec, source: str) -> bool:
        """Is there a kernel for keys ("pre_rope", "post_rope") or values ("value") in this codec?"""
        return True

    def turn(self, rotation: Rotation | None) -> Turn | None:
        """RoPE for keys in this codec, None where there is no kernel for it. Without a rotation: one of no pairs."""
        if rotation is None or rotation.style == "none":
            return _STILL
        return rotation.keep(("exact turn",), lambda: _Turn(rotation)).turn

    def fill(self, piece: Piece, segment: Segment) -> None:
        """Point `piece` at a segment of the store."""
        tensor = segment.parts[self.part].tensor
        piece.kind, piece.dtype, piece.data = self.kind, DTYPES.get(tensor.dtype, 0), tensor.data_ptr()
        piece.stride_b, piece.stride_h, piece.stride_t = tensor.stride()[:3]

    def _point(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        self._tensors.append(tensor)
        setattr(self.codec, name, tensor.data_ptr())


class _Codebook(Format):
    """Codebooks of 256 entries of 2, 4 or 8 numbers. Lanes of a block: code column, token, channel of the column."""

    kind, part = native.CODEBOOK, "codes"

    def __init__(self, codec: CodebookCodec) -> None:
        super().__init__(codec)
        tokens, channels = codec.block
        heads, groups, entries, size = codec.centroids.shape
        dim, columns = codec.head_dim, codec.head_dim // channels
        book = torch.arange(heads * groups, dtype=torch.int32).view(heads, groups) * entries
        column = torch.arange(dim, dtype=torch.int32).view(columns, 1, channels)
        self.lane_channel = column.expand(-1, tokens, -1).flatten()
        self.codec.tokens, self.codec.channels, self.codec.columns = tokens, channels, columns
        self._point("table", codec.centroids.float())
        self._point("book", book.repeat_interleave(columns // groups, dim=1))
        self._point("lane_channel", self.lane_channel)
        named = codec.constants()
        self._point("std", named.get("std", torch.ones(heads, dim)).float())
        self._point("mean", named.get("mean", torch.zeros(heads, dim)).float())

    @staticmethod
    def fits(codec: CodebookCodec, source: str) -> bool:
        entries, size = codec.centroids.shape[2:]
        columns = codec.head_dim // codec.block[1]
        return entries == 256 and size in (2, 4, 8) and columns % 2 == 0 and columns * size <= native.LANES

    def turn(self, rotation: Rotation | None) -> Turn | None:
        tokens, channels = self.codec.tokens, self.codec.channels
        if rotation is None or rotation.style == "none":
            return _STILL
        if rotation.style != "half" or rotation.width // 2 % channels:
            return None
        return rotation.keep(("turn", tokens, channels), lambda: _Turn(rotation, tokens, channels)).turn


class _Uniform(Format):
    """Uniform codes of 1, 2, 4 or 8 bits: keys after RoPE in groups of tokens, values in groups of channels."""

    kind, part = native.UNIFORM, "codes"

    def __init__(self, codec: UniformCodec) -> None:
        super().__init__(codec)
        self.codec.bits, self.codec.group = codec.bits, codec.group

    @staticmethod
    def fits(codec: UniformCodec, source: str) -> bool:
        return codec.bits in (1, 2, 4, 8) and codec.axis == ("token" if source == "value" else "channel")

    def turn(self, rotation: Rotation | None) -> Turn | None:
        return _STILL if rotation is None or rotation.style == "none" else None

    def fill(self, piece: Piece, segment: Segment) -> None:
        super().fill(piece, segment)
        scale, zero = segment.parts["scale"].tensor, segment.parts["zero"].tensor
        self.codec.words = segment.parts[self.part].tensor.shape[3]
        piece.dtype, piece.scale, piece.zero = DTYPES[scale.dtype], scale.data_ptr(), zero.data_ptr()
        piece.side_b, piece.side_h, piece.side_t = scale.stride()[:3]


class _Turn:
    """The C structure of a rotation, with the tables that it points to."""

    def __init__(self, rotation: Rotation, tokens: int = 1, channels: int = 1) -> None:
        """tokens, channels: a block's, for keys in codebooks."""
        half = rotation.width // 2
        lane = torch.arange(half * tokens)  # the first lanes of all pairs; see `_Codebook`
        channel = lane // (tokens * channels) * channels + lane % channels
        within = lane // channels % tokens
        steps = torch.arange(TURNS).unsqueeze(1)
        self._tensors = [rotation.frequencies.contiguous()]
        for angles in (
            steps.float() * rotation.frequencies,
            (steps * tokens + within).float() * rotation.frequencies[channel],
        ):
            self._tensors += [angles.cos() * rotation.scale, angles.sin() * rotation.scale]
        self.turn = Turn(half, rotation.style == "interleaved", 0, *(x.data_ptr() for x in self._tensors), len(lane))


class Reader:
    """The pieces of one stream; made once, pointed anew only where tensors were allocated or replaced."""

    def __init__(self, stream: Stream, form: Format) -> None:
        self.format, self._stream = form, stream
        self._held: list[object] = []
        self._pieces = (Piece * 0)()

    def pieces(self, run: Run) -> ctypes.Array[Piece]:
        """All pieces of the rows of `run`: sinks, recent (two slices of the ring), and one per segment."""
        stream, tokens = self._stream, run.tokens
        held = [stream.sinks, stream.ring, *(segment.parts for segment in stream.store.segments)]
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            self._point()
            self._held = held
        first, last = stream.split(tokens)
        self._pieces[0].tokens = first
        spare = iter(self._pieces[1:3])
        for at, end, x in stream.exact(slice(0, len(stream.lengths)), tokens, last, tokens):
            piece = next(spare)
            piece.first, piece.tokens, piece.data = at, end - at, x.data_ptr()
        for piece in spare:
            piece.tokens = 0
        for piece, segment in zip(self._pieces[3:], stream.store.segments, strict=True):
            piece.tokens = max(0, min(segment.tokens, last - first - segment.start))
        return self._pieces

    def _point(self) -> None:
        stream = self._stream
        self._pieces = (Piece * (3 + len(stream.store.segments)))()
        for piece, tensor in zip(self._pieces[:3], (stream.sinks, stream.ring, stream.ring), strict=True):
            piece.kind, piece.dtype, piece.data = native.EXACT, DTYPES[tensor.dtype], tensor.data_ptr()
            piece.stride_b, piece.stride_h, piece.stride_t = tensor.stride()[:3]
        for piece, segment in zip(self._pieces[3:], stream.store.segments, strict=True):
            piece.first = segment.start + stream.window.sinks
            self.format.fill(piece, segment)


_STILL = Turn()
_KINDS: dict[type[Codec], type[Format]] = {
    IdentityCodec: Format,
    CodebookCodec: _Codebook,
    UniformCodec: _Uniform,
}
_FORMATS: WeakKeyDictionary[Codec, Format | None] = WeakKeyDictionary()
_READERS: WeakKeyDictionary[Stream, Reader | None] = WeakKeyDictionary()


def reader_of(stream: Stream) -> Reader | None:
    """The reader of a stream; None where its codec has no kernel."""
    if stream not in _READERS:
        codec, source = stream.codec, stream.plan.source
        if codec not in _FORMATS:
            kind = _KINDS.get(type(codec))
            _FORMATS[codec] = kind(codec) if kind is not None and kind.fits(codec, source) else None
        form = _FORMATS[codec]
        _READERS[stream] = None if form is None else Reader(stream, form)
    return _READERS[stream]
