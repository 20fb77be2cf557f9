"""The prefix store without vLLM: files of blocks, the thread that writes them, and blocks as bytes."""

import errno
import json
import multiprocessing
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from random_transforms import random_layer, random_transform

from kvq_cli.attention.rotary import Rotation
from kvq_cli.codecs.transform import same_widths
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import partial_path
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build_parsed
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.prefix_store.pages import ExactPages, kvq_sides, packed_pages, stock_sides
from kvq_cli.vllm.prefix_store.planning import Planner
from kvq_cli.vllm.prefix_store.records import ExactBlocks, PackedBlocks, coded_records, exact_records
from kvq_cli.vllm.prefix_store.store import PrefixStore
from kvq_cli.vllm.prefix_store.transfers import Transfers, WrongBlocks
from kvq_cli.vllm.prefix_store.writer import Writer
from kvq_cli.vllm.rope import unrotate, unrotated

NBYTES = 1000


def key(number):
    return number.to_bytes(32, "big")


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


def test_blocks_of_another_fingerprint_are_not_found(store, tmp_path):
    store.save(key(1), block(1))
    assert key(1) not in PrefixStore(tmp_path, "other")


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


def test_blocks_computed_from_a_failed_load_are_not_stored():
    wrong = WrongBlocks()
    assert wrong.computed(prefix=[1, 2], written=[3])
    wrong.add([2])
    assert not wrong.computed(prefix=[1, 2], written=[3])
    assert not wrong.computed(prefix=[3], written=[4])  # what was computed from them is as wrong
    assert wrong.computed(prefix=[1], written=[2, 3])  # computed again
    assert wrong.computed(prefix=[1, 2, 3], written=[5])
    assert not wrong.computed(prefix=[4], written=[])


# Blocks as bytes.

SHAPE = ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=64, hidden_size=128, dtype="bfloat16")
ROTATION = Rotation("half", 10000 ** -(torch.arange(32) / 32), 64)
SIZE = 32


def plans(text="klt", bits=2, shape=SHAPE):
    method = build_parsed(text, bits=bits)
    generator = torch.Generator().manual_seed(3)
    return [
        method.plan(layer, shape, random_layer(method.calibration(shape), shape, generator))
        for layer in range(shape.layers)
    ]


def stock_caches(count=9, tokens=SIZE, order=(0, 1, 2, 3), seed=1):
    """Caches of vLLM's own attention, `[pages, kv_heads, tokens, 2 * head_dim]`, that lie in memory in this order."""
    shape = (count, SHAPE.kv_heads, tokens, 2 * SHAPE.head_dim)
    generator = torch.Generator().manual_seed(seed)
    caches = []
    for _ in range(SHAPE.layers):
        memory = torch.randn([shape[i] for i in order], generator=generator).to(torch.bfloat16)
        caches.append(memory.permute(*sorted(range(4), key=lambda i: order[i])))
    return caches


def stock_pages(caches, backend="FLASH_ATTN"):
    return ExactPages([stock_sides(cache, backend, 2, 64, torch.bfloat16) for cache in caches], SIZE)


def coded_blocks(pages, layer_plans, exact_blocks=1):
    exact = exact_records(SHAPE, SIZE, unrotated(64))
    coded = exact if layer_plans is None else coded_records(layer_plans, SHAPE, SIZE, [ROTATION] * SHAPE.layers)
    return ExactBlocks(pages, exact, coded, exact_blocks)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("text", ["klt", "klt:join_keys=on:join_values=on"])
def test_codes_are_those_of_the_codec_and_the_first_block_is_exact(text, bits):
    layer_plans, source, target = plans(text, bits), stock_caches(), stock_caches(seed=2)
    ids, indices, into = [4, 1, 7, 2], [0, 1, 2, 40], [3, 8, 0, 5]
    blocks = coded_blocks(stock_pages(source), layer_plans)
    stored = blocks.read(ids, indices)
    assert [len(row) for row in stored] == [blocks.nbytes(index) for index in indices]
    others = [cache.clone() for cache in target]
    coded_blocks(stock_pages(target), layer_plans).write(into, indices, stored)
    for layer, plan in enumerate(layer_plans):
        keys, values = source[layer].chunk(2, dim=-1)
        new_keys, new_values = target[layer].chunk(2, dim=-1)
        assert torch.equal(target[layer][into[0]], source[layer][ids[0]])  # bit for bit
        for old, new, index in list(zip(ids, into, indices, strict=True))[1:]:
            positions = torch.arange(SIZE) + index * SIZE
            before = unrotate(ROTATION, keys[old].float(), positions)[None]
            expected = plan.keys.codec.decode(plan.keys.codec.encode(before), torch.float32)
            assert torch.equal(new_keys[new], ROTATION.at(expected, index * SIZE)[0].to(torch.bfloat16))
            packed = plan.values.codec.encode(values[old][None])
            assert torch.equal(new_values[new], plan.values.codec.decode(packed, torch.bfloat16)[0])
        untouched = [i for i in range(9) if i not in into]
        assert torch.equal(target[layer][untouched], others[layer][untouched])


def test_bytes_of_a_block():
    """The codecs' own, each part aligned to 16 bytes."""
    numbers = SHAPE.kv_heads * SIZE * SHAPE.head_dim  # of the keys of a layer, or of its values
    for bits in (2, 4):
        layer_plans = plans(bits=bits)
        blocks = coded_blocks(stock_pages(stock_caches()), layer_plans)
        assert blocks.nbytes(0) == SHAPE.layers * 2 * numbers * 2
        streams = [stream.codec for plan in layer_plans for stream in plan.kept]
        parts = sum(len(codec.layout(2, 64, "bfloat16").parts) for codec in streams)
        codes = sum(codec.nominal_bits for codec in streams) * numbers / 8
        assert codes <= blocks.nbytes(1) < codes + 16 * parts


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("tokens", [SIZE, SIZE // 2])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"])
def test_pages_of_any_order_in_memory_and_of_part_of_a_block(backend, tokens, order):
    """vLLM's layouts: head by head, token by token, and heads of all pages."""
    source, target = (stock_caches(12, tokens, order, seed) for seed in (1, 2))
    stored = coded_blocks(stock_pages(source, backend), None).read([1, 4], [0, 1])
    coded_blocks(stock_pages(target, backend), None).write([2, 5], [0, 1], stored)
    ratio = SIZE // tokens
    for a, b in zip(source, target, strict=True):
        for old, new in ((1, 2), (4, 5)):
            assert torch.equal(a[old * ratio : (old + 1) * ratio], b[new * ratio : (new + 1) * ratio])
    keys, _ = stock_pages(source, backend).read(0, torch.tensor([1]))
    of_token = source[0][ratio + (SIZE - 1) // tokens, 1, -1, :64]
    assert torch.equal(keys[0, 1, SIZE - 1], of_token)


def test_pages_of_vllms_cpu_attention_have_all_keys_of_a_head_first():
    (cache, _) = stock_caches()
    keys, values = stock_sides(cache, "CPU_ATTN", 2, 64, torch.bfloat16)
    flat = cache[3, 1].flatten()
    assert torch.equal(keys[3, 1].flatten(), flat[: SIZE * 64])
    assert torch.equal(values[3, 1].flatten(), flat[SIZE * 64 :])


@pytest.mark.parametrize(
    ("backend", "heads", "dtype", "message"),
    [
        ("ROCM_ATTN", 2, torch.bfloat16, "--attention-backend ROCM_ATTN: its pages are not known"),
        ("FLASH_ATTN", 3, torch.bfloat16, "needs caches"),
        ("FLASH_ATTN", 2, torch.float16, "needs caches"),
    ],
)
def test_unknown_pages_are_refused(backend, heads, dtype, message):
    with pytest.raises(UsageError, match=message):
        stock_sides(stock_caches()[0], backend, heads, 64, dtype)


def test_block_sizes_that_cut_codes_are_refused():
    with pytest.raises(UsageError, match="packs 16 tokens together"):
        coded_records(plans(), SHAPE, 24, [ROTATION] * 2)


@pytest.mark.parametrize("method", ["fp16", "turboquant"])
def test_kvqs_own_pages(method):
    """Those of fp16 hold keys and values; others are stored byte for byte."""
    shape = replace(SHAPE, dtype="float32")
    layout = cache_layout([build_parsed(method, bits=2).plan(0, shape, {})] * 2, shape, SIZE)
    source, target = (
        [torch.randint(256, (6, 1, 1, layout.page_bytes), dtype=torch.uint8) for _ in range(2)] for _ in range(2)
    )
    whole = [cache.clone() for cache in target]
    PackedBlocks(packed_pages(target)).write([2, 5], [0, 7], PackedBlocks(packed_pages(source)).read([1, 4], [0, 7]))
    for a, b, before in zip(source, target, whole, strict=True):
        assert torch.equal(a[[1, 4]], b[[2, 5]]) and torch.equal(before[[0, 1, 3, 4]], b[[0, 1, 3, 4]])
    if method == "fp16":
        keys, values = kvq_sides(source, layout)[1]
        numbers = torch.cat([keys[3].flatten(), values[3].flatten()])
        assert torch.equal(numbers.view(torch.uint8), source[1][3, 0, 0])


def test_heads_with_widths_of_their_own():
    """Parts of codecs with a member for each list of heads."""
    method, generator = build_parsed("klt", bits=3), torch.Generator().manual_seed(5)
    rows = [[8, 8, 4, 4, 2, 2, 1, 1], [4, 4, 4, 4, 4, 2, 2, 2]]
    drawn = {kind: random_transform(rows, 2, 64, generator) for kind in "kv"}
    tensors = {f"{kind}.{name}": tensor for kind in "kv" for name, tensor in drawn[kind].items()}
    assert len(same_widths(drawn["k"])) == 2
    layer_plans = [method.plan(0, SHAPE, tensors)] * 2
    source, target = stock_caches(), stock_caches(seed=2)
    stored = coded_blocks(stock_pages(source), layer_plans, 0).read([1], [3])
    coded_blocks(stock_pages(target), layer_plans, 0).write([1], [3], stored)
    codec = layer_plans[0].values.codec
    values = source[0][1].chunk(2, dim=-1)[1][None]
    assert torch.equal(target[0][1].chunk(2, dim=-1)[1], codec.decode(codec.encode(values), torch.bfloat16)[0])


# A scheduler and a worker, without an engine.


class FakeEngine:
    """Caches of random numbers in which a block is computed by writing what its hash stands for."""

    def __init__(self, folder, layer_plans=None, blocks=20):
        self.store = PrefixStore(folder, "mine")
        self.caches = stock_caches(blocks, seed=9)
        self.blocks = coded_blocks(stock_pages(self.caches), layer_plans, 0)
        self.planner, self.transfers = Planner([self.store], SIZE), Transfers(self.store, self.blocks, SIZE)
        self.tables = {}

    def begin(self, request, blocks, local=0):
        """vLLM's `schedule` for a request whose first `local` tokens are in its cache; returns the tokens to load."""
        self.tables[request.request_id] = blocks
        loaded = self.planner.matched(request, local)
        self.planner.begin(request, loaded)
        return loaded

    def step(self, **spans):
        """A step that computes tokens [first, last) of each request; returns the blocks that were not loaded."""
        computed = {name: first for name, (first, _) in spans.items()}
        scheduled = {name: last - first for name, (first, last) in spans.items()}
        prompts = self.planner.steps(computed, scheduled, self.tables.__getitem__)
        self.transfers.load(prompts)
        for name, (first, last) in spans.items():
            for index in range(first // SIZE, last // SIZE):
                self.compute(name, index)
        self.transfers.store(prompts)
        self.transfers.writer.flush()
        return self.transfers.take_failed()

    def compute(self, name, index):
        for cache, numbers in zip(self.caches, numbers_of(int(name[1:]), index), strict=True):
            cache[self.tables[name][index]] = numbers

    def holds(self, name, index):
        """Whether a block holds what was computed for it."""
        block = self.tables[name][index]
        return all(torch.equal(a[block], b) for a, b in zip(self.caches, numbers_of(int(name[1:]), index), strict=True))


def numbers_of(prompt, index):
    generator = torch.Generator().manual_seed(100 * prompt + index)
    return [torch.randn(2, SIZE, 128, generator=generator).to(torch.bfloat16) for _ in range(SHAPE.layers)]


def request(number, tokens, answer=0):
    hashes = [key(100 * number + index) for index in range((tokens + answer) // SIZE)]
    return SimpleNamespace(
        request_id=f"r{number}", num_tokens=tokens + answer, num_prompt_tokens=tokens, block_hashes=hashes
    )


def test_a_prompt_in_chunks_is_stored_and_loaded_by_another_engine(tmp_path):
    one, r1 = FakeEngine(tmp_path), request(1, 4 * SIZE + 5)
    assert one.begin(r1, [3, 7, 1, 9, 4]) == 0
    assert not one.step(r1=(0, 40)) and not one.step(r1=(40, 100)) and not one.step(r1=(100, 4 * SIZE + 5))
    one.step(r1=(4 * SIZE + 5, 4 * SIZE + 6))  # decodes
    assert [key(100 + index) in one.store for index in range(5)] == [True] * 4 + [False]
    one.planner.end("r1")

    two = FakeEngine(tmp_path)
    assert two.begin(r1, [0, 5, 8, 2, 6]) == 4 * SIZE
    assert not two.step(r1=(4 * SIZE, 4 * SIZE + 5))
    assert all(two.holds("r1", index) for index in range(4))
    # With some blocks in vLLM's cache, the others are loaded.
    two.begin(request(1, 4 * SIZE), [0, 5, 11, 12], local=SIZE)
    assert not two.step(r1=(3 * SIZE, 4 * SIZE)) and two.holds("r1", 2)


def test_codes_are_loaded(tmp_path):
    layer_plans, r1 = plans(bits=4), request(1, 2 * SIZE)
    one, two = (FakeEngine(tmp_path, layer_plans) for _ in range(2))
    one.begin(r1, [3, 7])
    one.step(r1=(0, 2 * SIZE))
    assert two.begin(r1, [4, 5]) == SIZE  # one token at least is computed
    two.step(r1=(SIZE, 2 * SIZE))
    assert not two.holds("r1", 0) and two.holds("r1", 1)
    codec = layer_plans[0].values.codec
    values = numbers_of(1, 0)[0].chunk(2, dim=-1)[1][None]
    assert torch.equal(two.caches[0][4].chunk(2, dim=-1)[1], codec.decode(codec.encode(values), torch.bfloat16)[0])


@pytest.mark.parametrize("lost", [True, False])
def test_a_failed_load_is_reported_and_nothing_is_stored_from_it(tmp_path, lost):
    """Between lookup and load, a file is lost or damaged; another request shares the block in the same step."""
    first = FakeEngine(tmp_path)
    first.begin(request(1, 4 * SIZE), [0, 1, 2, 3])
    first.step(r1=(0, 4 * SIZE))
    engine, r1 = FakeEngine(tmp_path), request(1, 6 * SIZE)
    assert engine.begin(r1, [10, 11, 12, 13, 14, 15]) == 4 * SIZE
    path = engine.store.path(key(101))
    path.unlink() if lost else path.write_bytes(path.read_bytes()[:-1])
    shares = request(2, 5 * SIZE)
    engine.tables["r2"] = [10, 11, 12, 13, 16]
    engine.planner.begin(shares, 0)
    assert engine.step(r1=(4 * SIZE, 5 * SIZE), r2=(4 * SIZE, 5 * SIZE)) == {11, 12, 13}
    assert not engine.step(r1=(5 * SIZE, 6 * SIZE))  # scheduled before vLLM knew
    assert not any(key(number) in engine.store for number in (101, 104, 105, 204))
    # vLLM computes again from the first block that was not loaded.
    engine.step(r1=(SIZE, 6 * SIZE))
    assert all(key(100 + index) in engine.store for index in range(6))
    engine.step(r2=(4 * SIZE, 5 * SIZE))
    assert key(204) in engine.store
    again = FakeEngine(tmp_path)
    assert again.begin(request(1, 6 * SIZE + 1), list(range(7))) == 6 * SIZE
    assert not again.step(r1=(6 * SIZE, 6 * SIZE + 1)) and all(again.holds("r1", index) for index in range(6))


def test_a_preempted_request_loads_its_prompt_and_what_others_stored_of_its_answer(tmp_path):
    engine, turn = FakeEngine(tmp_path), request(1, 4 * SIZE)  # a second turn: the prompt of the first, and its answer
    engine.begin(turn, [0, 1, 2, 3])
    engine.step(r1=(0, 4 * SIZE))
    resumed = request(1, 2 * SIZE, answer=2 * SIZE + 3)
    assert engine.begin(resumed, [8, 9, 10, 11, 12]) == 4 * SIZE
    engine.step(r1=(4 * SIZE, 4 * SIZE + 3))
    assert all(engine.holds("r1", index) for index in range(4))


def test_blocks_of_vllms_cache_are_stored_when_a_prompt_begins(tmp_path):
    """Those of an answer, which is part of the next turn's prompt, and those that left the store."""
    engine, r1 = FakeEngine(tmp_path), request(1, 3 * SIZE)
    engine.tables["r1"] = [4, 5, 6]
    for index in range(2):
        engine.compute("r1", index)
    assert engine.begin(r1, [4, 5, 6], local=2 * SIZE) == 0
    engine.step(r1=(2 * SIZE, 3 * SIZE))
    assert all(key(100 + index) in engine.store for index in range(3))
