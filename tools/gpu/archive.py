"""Pack a GPU command's results into an archive, and unpack an archive into the repository.

python tools/gpu/archive.py pack NAME FOLDER INTO    FOLDER's results -> INTO/NAME.tar.gz
python tools/gpu/archive.py unpack FILE              results -> benchmarks/GPU/, tuning rows merged into the tables

The archive of gpu-tune has the rows of the tuning tables that its search changed, and no others: those of the tables
that it started from may be outdated when the archive is unpacked.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

#: A tuning table, or a part of it: GPU family -> class of shapes -> values.
Table: TypeAlias = dict[str, dict[str, dict[str, int]]]
ROOT = Path(__file__).parents[2]
TABLES = "kernels/kvq_kernels/{}/tuning.json"
#: Patterns of result files.
RESULTS = ("*.json", "*.png", "*.log")


def pack(name: str, folder: Path, into: Path) -> Path:
    """Write `INTO/NAME.tar.gz` with a folder's results and, for gpu-tune, the changed tuning rows; returns its path."""
    into.mkdir(parents=True, exist_ok=True)
    target = into / f"{name}.tar.gz"
    tables = changed_rows(folder / "tune.json", target) if name == "gpu-tune" else {}
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(path for pattern in RESULTS for path in folder.glob(pattern)):
            archive.add(path, f"results/{path.name}")
        documents = {f"tables/{operation}.json": table for operation, table in sorted(tables.items())}
        for file, document in {**documents, "about.json": {"command": name, "gpu": gpu_name()}}.items():
            content = json.dumps(document).encode()
            header = tarfile.TarInfo(file)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return target


def changed_rows(result: Path, earlier: Path) -> dict[str, Table]:
    """Return, by operation, the rows that the searches of `result` and of an `earlier` archive wrote into the tables,
    and that are still there: a second search continues the first one, but tells its own changes only."""
    found: dict[str, Table] = {}
    rows = json.loads(result.read_text())["rows"] if result.exists() else []
    faster = [row for row in rows if row["us"] < row["before_us"]]
    changed = [(row["operation"], row["gpu"], row["class"], row["best"]) for row in faster]
    for operation, gpu, key, values in [*_rows_of(earlier), *changed]:
        if _table(operation).get(gpu, {}).get(key) == values:
            found.setdefault(operation, {}).setdefault(gpu, {})[key] = values
    return found


def _rows_of(file: Path) -> Iterator[tuple[str, str, str, dict[str, int]]]:
    """Yield (operation, GPU family, class, values) of the tuning rows in an archive, if it exists."""
    for name, content in _documents(file).items() if file.exists() else ():
        if name.startswith("tables/"):
            for gpu, classes in json.loads(content).items():
                yield from ((Path(name).stem, gpu, key, values) for key, values in classes.items())


def _table(operation: str) -> Table:
    return json.loads((ROOT / TABLES.format(operation)).read_text())


def gpu_name() -> str:
    """Return the name of the folder for the GPU's results, like `nvidia-h200`."""
    import torch

    return torch.cuda.get_device_name().lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"


def unpack(file: Path, root: Path = ROOT) -> list[Path]:
    """Write results to benchmarks/GPU and merge tuning rows into the repository's tables; returns the changed files."""
    written = []
    documents = _documents(file)
    about = json.loads(documents.pop("about.json"))
    for name, content in documents.items():
        kind, _, rest = name.partition("/")
        if kind == "results":
            path = root / "benchmarks" / about["gpu"] / Path(rest).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            written.append(path)
        elif kind == "tables":
            path = root / TABLES.format(Path(rest).stem)
            if path.exists() and merge(path, json.loads(content)):
                written.append(path)
    return written


def _documents(file: Path) -> dict[str, bytes]:
    """Return the contents of an archive's files by name."""
    with tarfile.open(file) as archive:
        return {member.name: _read(archive, member) for member in archive if member.isfile()}


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "a regular file has contents"
    return file.read()


def merge(path: Path, measured: Table) -> bool:
    """Add the rows of a tuning table to the table at `path`; returns whether that changed it."""
    sys.path.insert(0, str(ROOT / "kernels"))
    from kvq_kernels import tuning

    table = json.loads(path.read_text())
    merged = {gpu: table.get(gpu, {}) | rows for gpu, rows in (table | measured).items()}
    if merged == table:
        return False
    path.write_text(tuning.text(merged))
    return True


def main(words: list[str]) -> int:
    if words[:1] == ["pack"] and len(words) == 4:
        print(f"written: {pack(words[1], *map(Path, words[2:]))}")
        return 0
    if words[:1] == ["unpack"] and len(words) == 2:
        for path in unpack(Path(words[1])):
            print(f"written: {path.relative_to(ROOT)}")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
