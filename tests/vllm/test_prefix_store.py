"""The files of a prefix store, and the thread that writes them."""

import errno
import json
import multiprocessing
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from prefix_blocks import key
from safetensors.torch import save_file

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import partial_path
from kvq_cli.vllm.prefix_store.identity import model_identity
from kvq_cli.vllm.prefix_store.store import PrefixStore
from kvq_cli.vllm.prefix_store.writer import Writer

NBYTES = 1000


def block(number):
    return torch.randint(256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def store(tmp_path):
    return PrefixStore(tmp_path, "mine")


def stored_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_another_process_finds_the_same_bytes(store, tmp_path):
    assert key(1) not in store and store.load(key(1), NBYTES) is None
    store.save(key(1), block(1))
    again = PrefixStore(tmp_path, "mine")
    assert key(1) in again and torch.equal(again.load(key(1), NBYTES), block(1))
    assert key(2) not in again
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_a_folder_in_the_memory_of_the_host():
    size = NBYTES + 400  # of a file, at most
    with TemporaryDirectory(dir="/dev/shm") as folder:
        small = PrefixStore(Path(folder), "mine", capacity=6 * size)
        small.check_writable()
        for number in range(10):
            small.save(key(number), block(number))
            small.touch([key(number)])
        assert 0 < stored_bytes(Path(folder)) <= 6 * size and key(0) not in small
        assert torch.equal(PrefixStore(Path(folder), "mine").load(key(9), NBYTES), block(9))


def test_blocks_of_another_fingerprint_are_not_found(store, tmp_path):
    store.save(key(1), block(1))
    assert key(1) not in PrefixStore(tmp_path, "other")


def identity_of(folder, name, *rows):
    """The identity of a model whose only tensor has these rows of 8 KiB."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text("{}")
    tensor = torch.stack([torch.full((8192,), row, dtype=torch.uint8) for row in rows])
    save_file({"weight": tensor}, path / "model.safetensors")
    return model_identity(str(path), None)


def test_models_that_differ_at_either_end_of_a_tensor_share_no_blocks(tmp_path):
    same = identity_of(tmp_path, "a", 1, 2, 3)
    assert identity_of(tmp_path, "b", 1, 2, 3) == same
    assert len({same, identity_of(tmp_path, "c", 1, 2, 4), identity_of(tmp_path, "d", 4, 2, 3)}) == 3


@pytest.mark.parametrize("data", [b"", b"no safetensors at all", b"\2" + bytes(7) + b"[]", b"\2" + bytes(7) + b"{"])
def test_damaged_weights_are_named(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UsageError, match=r"model\.safetensors as safetensors: "):
        model_identity(str(tmp_path), None)


def _cut(data):
    return data[: len(data) // 2]


def _flip(at):
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda data: b"",
        lambda data: data[:8],
        lambda data: data + b"x",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: b"no safetensors at all",
        lambda data: data + bytes(1 << 20),
        *map(_flip, (0, 9, 40, 200, -1, -NBYTES // 2)),
    ],
)
def test_damaged_files_are_misses_and_are_written_again(store, damage):
    store.save(key(1), block(1))
    path = store.path(key(1))
    path.write_bytes(damage(path.read_bytes()))
    assert store.load(key(1), NBYTES) is None
    assert key(1) not in store
    store.save(key(1), block(1))
    assert torch.equal(store.load(key(1), NBYTES), block(1))


def test_other_files_in_the_folder_are_neither_counted_nor_removed(store, tmp_path):
    other = tmp_path / "models" / "llama" / "model.safetensors"
    other.parent.mkdir(parents=True)
    other.write_bytes(bytes(1 << 20))
    small = PrefixStore(tmp_path, store.fingerprint, 3 * NBYTES)
    small.save(key(1), block(1))
    small.evict(3 * NBYTES)
    assert key(1) not in small and other.stat().st_size == 1 << 20


def test_a_disk_that_does_not_answer_is_a_miss_and_removes_nothing(store, monkeypatch):
    store.save(key(1), block(1))

    def fails(path, at_most):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("kvq_cli.vllm.prefix_store.store.read_bytes", fails)
        assert store.load(key(1), NBYTES) is None
    assert torch.equal(store.load(key(1), NBYTES), block(1))


def test_a_long_fingerprint_is_read_back(tmp_path):
    store = PrefixStore(tmp_path, json.dumps({"overrides": "x" * 9000}))
    store.save(key(1), block(1))
    assert torch.equal(store.load(key(1), NBYTES), block(1))


def test_foreign_files_are_misses(store, tmp_path):
    """A valid file of another block, of another fingerprint, or of other bytes, under this block's name."""
    other = PrefixStore(tmp_path, "other")
    for source, name, size in ((store, key(2), NBYTES), (other, key(1), NBYTES), (store, key(1), NBYTES + 1)):
        source.save(name, torch.zeros(size, dtype=torch.uint8))
        data = source.path(name).read_bytes()
        store.path(key(1)).parent.mkdir(parents=True, exist_ok=True)
        store.path(key(1)).write_bytes(data)
        assert store.load(key(1), NBYTES) is None
    store.path(key(3)).parent.mkdir()
    os.mkfifo(store.path(key(3)))
    assert key(3) not in store and store.load(key(3), NBYTES) is None


def test_least_recently_used_blocks_leave_first(tmp_path):
    size = stored_size(tmp_path / "one")
    store = PrefixStore(tmp_path / "all", "mine", capacity=10 * size)
    for number in range(10):
        store.save(key(number), block(number))
        store.touch([key(number)])
        time.sleep(0.002)
    store.touch([key(0), key(1)])
    store.save(key(10), block(10))
    assert stored_bytes(tmp_path / "all") <= 10 * size
    held = [number for number in range(11) if key(number) in store]
    assert 0 in held and 1 in held and 10 in held and 2 not in held and len(held) >= 8


def stored_size(folder):
    one = PrefixStore(folder, "mine")
    one.save(key(1), block(1))
    return stored_bytes(folder)


def test_the_end_of_a_prefix_leaves_before_its_start(tmp_path):
    size = stored_size(tmp_path / "one")
    store = PrefixStore(tmp_path / "all", "mine", capacity=8 * size)
    for number in range(8):
        store.save(key(number), block(number))
    store.touch([key(number) for number in range(8)])
    store.save(key(9), block(9))
    held = [number for number in range(8) if key(number) in store]
    assert held == list(range(len(held))) and 5 <= len(held) < 8


def test_blocks_of_other_models_leave_too(tmp_path):
    size = stored_size(tmp_path / "one")
    old = PrefixStore(tmp_path / "all", "old")
    for number in range(20):
        old.save(key(number), block(number))
    new = PrefixStore(tmp_path / "all", "new", capacity=10 * size)
    new.save(key(1), block(1))
    assert stored_bytes(tmp_path / "all") <= 10 * size and key(1) in new


def test_a_capacity_below_one_block(tmp_path):
    with pytest.raises(KvqError, match="larger --prefix-store-size"):
        PrefixStore(tmp_path, "mine", capacity=100).save(key(1), block(1))


def write(folder, capacity, turns, written):
    store = PrefixStore(folder, "mine", capacity)
    for _ in range(turns):
        for number in range(20):
            store.save(key(number), block(number))
            written.value += 1


def writing(folder, capacity, turns):
    """A process that writes 20 blocks over and over, and its count of writes."""
    forking = multiprocessing.get_context("fork")
    written = forking.Value("q", 0)
    process = forking.Process(target=write, args=(folder, capacity, turns, written))
    process.start()
    return process, written


def test_processes_write_read_and_evict_in_one_folder(tmp_path):
    size = stored_size(tmp_path / "one")
    folder = tmp_path / "all"
    writers = [writing(folder, 12 * size, 15)[0] for _ in range(2)]
    reader, hits = PrefixStore(folder, "mine"), 0
    while any(writer.is_alive() for writer in writers):
        for number in range(20):
            found = reader.load(key(number), NBYTES)
            assert found is None or torch.equal(found, block(number))
            hits += found is not None
        time.sleep(0.01)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0] and hits
    PrefixStore(folder, "mine", 12 * size).evict()
    assert 0 < stored_bytes(folder) <= 12 * size


def test_a_killed_writer_leaves_whole_files_and_no_partial_ones(tmp_path):
    for _ in range(3):
        writer, written = writing(tmp_path, None, 10**6)
        while written.value < 25:
            time.sleep(0.01)
        writer.kill()
        writer.join()
        store = PrefixStore(tmp_path, "mine")
        # As killed in the middle of a file, which happens by chance alone.
        half = partial_path(store.path(key(5)))
        half = half.with_name(half.name.replace(f".{os.getpid()}.", f".{writer.pid}."))
        half.write_bytes(store.path(key(5)).read_bytes()[:100])
        for number in range(20):
            assert torch.equal(store.load(key(number), NBYTES), block(number))
        store.evict()
        assert not list(tmp_path.rglob("*.partial"))


def test_the_thread_writes_and_close_waits(store):
    writer = Writer(store)
    assert writer.wants(key(1))
    writer.put([key(1), key(2)], {key(1): block(1), key(2): block(2)})
    writer.flush()
    assert not writer.wants(key(1)) and torch.equal(store.load(key(2), NBYTES), block(2))
    assert store.path(key(1)).stat().st_mtime_ns > store.path(key(2)).stat().st_mtime_ns
    writer.put([key(3)], {key(3): block(3)})
    writer.close()
    writer.close()
    assert key(3) in store


def test_no_more_bytes_wait_than_allowed(store, monkeypatch):
    writer = Writer(store, max_waiting=1500)
    with writer._changed:  # the thread cannot take the next
        for number in (1, 2):
            assert writer.wants(key(number))
            writer.put([key(number)], {key(number): block(number)})
        assert not writer.wants(key(1)) and not writer.wants(key(3))
    writer.flush()
    assert writer.wants(key(3))
    writer.close()


def test_a_full_disk_ends_nothing(store, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    writer = Writer(store)
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    writer.put([key(1), key(2)], {key(1): block(1), key(2): block(2)})
    writer.flush()
    monkeypatch.undo()
    writer.put([key(3)], {key(3): block(3)})
    writer.close()
    assert key(1) not in store and key(3) in store
    assert caplog.text.count("no space left") == 1
