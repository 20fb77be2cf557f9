"""Carry compiled kernels to a machine with a GPU: Triton's cache as one file.

    python tools/gpu/pack.py make CACHE USED FILE      the entries of CACHE that USED lists -> FILE (.tar.xz)
    python tools/gpu/pack.py run CACHE [--pack FILE] COMMAND...
        run COMMAND with this cache, filled from FILE where that is given; says how many kernels were compiled

A cache's entry is found by a hash of the kernel's source, its arguments' types, the compiler and its options: the same
versions of Triton and Python and the same sources use what was compiled elsewhere.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

#: What a launch needs of an entry, and the PTX, which is readable and executed in tests. The rest is the compiler's.
KEPT = {".cubin", ".ptx", ".json", ".so"}
GROUP = "__grp__"


def make(cache: Path, used: Path, target: Path) -> None:
    """Write the pack. OSError where an entry is missing."""
    entries = sorted({Path(line).name for line in used.read_text().splitlines() if line})
    target.parent.mkdir(parents=True, exist_ok=True)
    kernels = 0
    with tarfile.open(target, "w:xz", preset=6) as archive:
        text = json.dumps(versions()).encode()
        about = tarfile.TarInfo("about.json")
        about.size = len(text)
        archive.addfile(about, io.BytesIO(text))
        for entry in entries:
            for path in sorted((cache / entry).iterdir()) if (cache / entry).is_dir() else []:
                if path.suffix in KEPT:
                    archive.add(path, f"{entry}/{path.name}")
                    kernels += path.name.startswith(GROUP)
    print(f"written: {target}, {kernels} kernels, {target.stat().st_size / 2**20:.1f} MiB")


def versions() -> dict[str, str]:
    """Whatever Triton's keys are made of, beside the sources."""
    import triton
    from triton.runtime.cache import triton_key

    key = hashlib.sha256(triton_key().encode()).hexdigest()[:16]
    return {"triton": triton.__version__, "triton_key": key, "python": platform.python_version(), "so": so_suffix()}


def so_suffix() -> str:
    import sysconfig

    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def install(file: Path, cache: Path) -> None:
    """Fill a cache from a pack, once; entries name their files by absolute paths, which are those of this cache."""
    mark, digest = cache / ".pack", hashlib.sha256(file.read_bytes()).hexdigest()
    if mark.exists() and mark.read_text() == digest:
        return
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as archive:
        made = json.load(archive.extractfile("about.json"))
        archive.extractall(cache, filter="data")
    for path in cache.glob(f"*/{GROUP}*"):
        names = json.loads(path.read_text())["child_paths"]
        present = {name: str(path.parent / name) for name in names if (path.parent / name).exists()}
        path.write_text(json.dumps({"child_paths": present}))
    mark.write_text(digest)
    here = versions()
    unlike = {key: (made[key], here[key]) for key in ("triton", "triton_key", "so") if made[key] != here[key]}
    for key, (theirs, ours) in unlike.items():
        print(f"the pack was made with another {key} ({theirs}, here {ours}): kernels are compiled here")


def run(cache: Path, file: Path | None, command: list[str]) -> int:
    """The command's exit code."""
    cache = cache.absolute()
    if file is not None and file.exists():
        install(file, cache)
    before = count(cache)
    code = subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": str(cache)}).returncode
    print(f"{count(cache) - before} kernels were compiled, {before} were in the cache")
    return code


def count(cache: Path) -> int:
    """Compiled kernels."""
    return sum(1 for _ in cache.glob(f"*/{GROUP}*"))


def main(words: list[str]) -> int:
    if words[:1] == ["make"] and len(words) == 4:
        make(*map(Path, words[1:]))
        return 0
    if words[:1] == ["run"] and len(words) > 2:
        cache, rest = Path(words[1]), words[2:]
        file = Path(rest[1]) if rest[0] == "--pack" else None
        return run(cache, file, rest[2:] if file is not None else rest)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
