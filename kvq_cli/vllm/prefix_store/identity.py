"""What two engines must have in common to share blocks, as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_cli.errors import UsageError, reading
from kvq_cli.vllm.prefix_store.store import FORMAT
from kvq_cli.vllm.prepare import weights_folder

#: Bytes at each end of a tensor that stand for it: training changes all of them, and new tokens the last ones.
_SAMPLE = 2048


def model_identity(source: str, revision: str | None) -> str:
    """Return the sha256 of a model's configuration, of its tensors' names and shapes, and of both ends of each tensor.

    Keys and values depend on all weights, of which an artifact's fingerprint has some. A model that differs between
    these ends alone counts as the same. Raises UsageError for weights that cannot be read here. source: its folder or
    Hub id.
    """
    folder = weights_folder(source, revision)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise UsageError(f"the prefix store needs the model's weights as safetensors files, and {source} has none here")
    digest = hashlib.sha256()
    if (config := folder / "config.json").is_file():
        digest.update(config.read_bytes())
    for file in files:
        with reading(f"cannot read {file} as safetensors", kind=UsageError):
            _add_weights(digest, file)
    return digest.hexdigest()


def _add_weights(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= path.stat().st_size - 8:
            raise ValueError(f"it has no header of {size:,} bytes")
        header = file.read(size)
        digest.update(header)
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        for entry in tensors.values():
            first, last = entry["data_offsets"]
            for place in (first, max(first, last - _SAMPLE)):
                file.seek(8 + size + place)
                digest.update(file.read(min(last - place, _SAMPLE)))


def fingerprint(rank: int, ranks: int, block_size: int, dtype: str, **others: Any) -> str:
    """Return the fingerprint of the blocks of one of `ranks`.

    dtype: of the cache. others: the model's identity, how it is loaded, the digest of the codes' artifact, ...
    """
    common: Mapping[str, Any] = {"format": FORMAT, "block_size": block_size, "dtype": dtype, **others}
    return json.dumps({**common, "rank": f"{rank} of {ranks}"}, sort_keys=True, default=str)
