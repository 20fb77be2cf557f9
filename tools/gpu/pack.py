"""Pack Triton's cache of compiled kernels into a file, to use it on a machine with a GPU.

    python tools/gpu/pack.py make CACHE USED FILE      write the entries of CACHE that USED lists to FILE (.tar.xz)
    python tools/gpu/pack.py run CACHE [--pack FILE] COMMAND...
        run COMMAND with this cache, filled from FILE if given, and print how many kernels it compiled

The key of a cache entry is a hash of the kernel's source, argument types, the compiler and its options: with the same
sources and the same versions of Triton and Python, entries compiled on another machine are found.
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

#: Files of an entry that a launch needs, and the PTX, which tests execute.
KEPT = {".cubin", ".ptx", ".json", ".so"}
GROUP = "__grp__"


def make(cache: Path, used: Path, target: Path) -> None:
    """Write the entries of `cache` that the file `used` lists to `target`; missing entries are skipped."""
    entries = sorted({Path(line).name for line in used.read_text().splitlines() if line})
    target.parent.mkdir(parents=True, exist_ok=True)
    kernels = 0
    with tarfile.open(target, "w:xz", preset=6) as archive:
        text = json.dumps(versions()).encode()
        header = tarfile.TarInfo("about.json")
        header.size = len(text)
        archive.addfile(header, io.BytesIO(text))
        for entry in entries:
            for path in sorted((cache / entry).iterdir()) if (cache / entry).is_dir() else []:
                if path.suffix in KEPT:
                    archive.add(path, f"{entry}/{path.name}")
                    kernels += path.name.startswith(GROUP)
    print(f"written: {target}, {kernels} kernels, {target.stat().st_size / 2**20:.1f} MiB")


def versions() -> dict[str, str]:
    """Return the versions that Triton's cache keys depend on."""
    import triton
    from triton.runtime.cache import triton_key

    key = hashlib.sha256(triton_key().encode()).hexdigest()[:16]
    return {"triton": triton.__version__, "triton_key": key, "python": platform.python_version(), "so": so_suffix()}


def so_suffix() -> str:
    """Return the file ending of C extensions, which names Python's version and the platform."""
    import sysconfig

    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def install(file: Path, cache: Path) -> None:
    """Fill a cache from a pack, once, and rewrite the absolute paths inside its entries."""
    mark, digest = cache / ".pack", hashlib.sha256(file.read_bytes()).hexdigest()
    if mark.exists() and mark.read_text() == digest:
        return
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as archive:
        about = archive.extractfile("about.json")
        if about is None:
            sys.exit(f"{file} is not a pack: about.json is not a file")
        packed = json.load(about)
        # Python 3.11.0 to 3.11.3 (Debian 12) have no filters.
        archive.extractall(cache, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    for path in cache.glob(f"*/{GROUP}*"):
        names = json.loads(path.read_text())["child_paths"]
        present = {name: str(path.parent / name) for name in names if (path.parent / name).exists()}
        path.write_text(json.dumps({"child_paths": present}))
    mark.write_text(digest)
    here = versions()
    for key in ("triton", "triton_key", "so"):
        if packed[key] != here[key]:
            print(f"the pack was made with another {key} ({packed[key]}, here {here[key]}): kernels are compiled here")


def run(cache: Path, file: Path | None, command: list[str]) -> int:
    """Run the command with the cache and return its exit code."""
    cache = cache.absolute()
    if file is not None and file.exists():
        install(file, cache)
    before = count(cache)
    code = subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": str(cache)}).returncode
    print(f"{count(cache) - before} kernels were compiled, {before} were in the cache")
    return code


def count(cache: Path) -> int:
    """Return the number of compiled kernels in a cache."""
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
