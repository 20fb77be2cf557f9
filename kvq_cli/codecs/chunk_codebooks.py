"""Codebooks over chunks of 1, 2, 4 or 8 components of a transform: nearest centroids, and components looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvq_cli.codecs.layout import TensorSpec
from kvq_cli.codecs.nearest import KEEPS_TABLES, MAX_ENTRIES, grid_max, grid_scale, nearest, ranked, ranked_layout
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Components of a chunk, which is one 8-bit code: 8, 4, 2 or 1 bits per component.
CHUNKS = (1, 2, 4, 8)


class ChunkCodebooks:
    """Codebooks of the chunks of one length of all groups of channels.

    centroids: `[chunks, 256, size]`, 16 or 32 bits, in the order of the groups; may be a view.
    """

    def __init__(self, centroids: Tensor) -> None:
        self.centroids = centroids
        self._scale = grid_scale(centroids)
        self._gain = self._scale.repeat_interleave(centroids.shape[2])
        self._ranked: Tensor | None = None

    @staticmethod
    def layout(chunks: int, size: int) -> dict[str, TensorSpec]:
        """Shapes and dtypes of `constants`, with the table that a CPU makes, of `chunks` codebooks."""
        scale, gain = TensorSpec((chunks,), "float32"), TensorSpec((chunks * size,), "float32")
        return {"scale": scale, "gain": gain, "ranked": ranked_layout(chunks, MAX_ENTRIES, size)}

    def constants(self) -> Mapping[str, Tensor]:
        named = {"scale": self._scale, "gain": self._gain}
        return named if self._ranked is None else named | {"ranked": self._ranked}

    def encode(self, z: Tensor) -> Tensor:
        """Index of each chunk's nearest centroid, uint8 `[chunks, tokens]`. z: `[tokens, components]` float32."""
        chunks, _, size = self.centroids.shape
        most = grid_max(MAX_ENTRIES)
        z = (z * self._gain).round_().clamp_(-most, most)
        return nearest(z.view(-1, chunks, size).transpose(0, 1), self._table())

    def _table(self) -> Tensor:
        """As `CodebookCodec` keeps it: made once on a CPU."""
        if self._ranked is not None:
            return self._ranked
        table = ranked(self.centroids, self._scale)
        if table.device.type in KEEPS_TABLES:
            self._ranked = table
        return table


class ComponentLookup:
    """Looks up the components that codes stand for.

    rows: the centroids' components, `[components of all groups, 256]`, 16 or 32 bits: chunks of 1 component of all
    groups first, then those of 2, 4 and 8. counts: by chunk length, the chunks of each group.

    A row has the numbers of one component for all codes of its chunk. It is read for all tokens before the next one, so
    that it stays in a core's cache, and components come out by group, as a product with a group's transform needs them.
    """

    def __init__(self, rows: Tensor, counts: Mapping[int, Sequence[int]]) -> None:
        self._rows = rows
        #: Of each component of each group, its row and the column of its code.
        places: list[list[tuple[int, int]]] = [[] for _ in next(iter(counts.values()))]
        row = column = 0
        for size, chunks in counts.items():
            for group, count in enumerate(chunks):
                places[group] += [(row + i, column + i // size) for i in range(size * count)]
                row, column = row + size * count, column + count
        self.kept = [len(group) for group in places]
        row_of, column_of = zip(*sum(places, []), strict=True)
        self._column = torch.tensor(column_of, dtype=torch.int32, device=rows.device)
        self._offset = torch.tensor(row_of, dtype=torch.int32, device=rows.device).mul_(MAX_ENTRIES).unsqueeze(1)

    @staticmethod
    def layout(components: int, dtype: str) -> dict[str, TensorSpec]:
        """Shapes and dtypes of `constants` for so many components of all groups."""
        column, offset = TensorSpec((components,), "int32"), TensorSpec((components, 1), "int32")
        return {"centroids": TensorSpec((components, MAX_ENTRIES), dtype), "column.offset": column, "offset": offset}

    def constants(self) -> Mapping[str, Tensor]:
        return {"centroids": self._rows, "column.offset": self._column, "offset": self._offset}

    def __call__(self, codes: Tensor) -> tuple[Tensor, ...]:
        """uint8 `[tokens, codes]` -> `[components, tokens]` float32 of each group."""
        index = codes.T.index_select(0, self._column) + self._offset
        return self._rows.view(-1).index_select(0, index.view(-1)).view(index.shape).float().split(self.kept)
