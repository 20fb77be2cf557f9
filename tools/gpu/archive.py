"""Pack a GPU command's results into an archive, and unpack an archive into the repository.

python tools/gpu/archive.py pack NAME FOLDER INTO    FOLDER's results and the tuned tables -> INTO/NAME.tar.gz
python tools/gpu/archive.py unpack FILE              results -> benchmarks/GPU/, tables merged into the kernels'
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLES = "kernels/kvq_kernels/{}/tuning.json"
#: Patterns of result files.
RESULTS = ("*.json", "*.png", "*.log")


def pack(name: str, folder: Path, into: Path) -> Path:
    """Write `INTO/NAME.tar.gz` with a folder's results and the tuning tables of all operations; returns its path."""
    into.mkdir(parents=True, exist_ok=True)
    target = into / f"{name}.tar.gz"
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(path for pattern in RESULTS for path in folder.glob(pattern)):
            archive.add(path, f"results/{path.name}")
        for path in sorted(ROOT.glob(TABLES.format("*"))):
            archive.add(path, f"tables/{path.parent.name}.json")
        text = json.dumps({"command": name, "gpu": gpu_name()}).encode()
        header = tarfile.TarInfo("about.json")
        header.size = len(text)
        archive.addfile(header, io.BytesIO(text))
    return target


def gpu_name() -> str:
    """Return the name of the folder for the GPU's results, like `nvidia-h200`."""
    import torch

    return torch.cuda.get_device_name().lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"


def unpack(file: Path, root: Path = ROOT) -> list[Path]:
    """Write results to benchmarks/GPU and merge tuning tables into the repository's; returns the changed files."""
    written = []
    with tarfile.open(file) as archive:
        documents = {member.name: _read(archive, member) for member in archive if member.isfile()}
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


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "a regular file has contents"
    return file.read()


def merge(path: Path, measured: dict[str, dict[str, dict[str, int]]]) -> bool:
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
