"""A scheduler and a worker of a prefix store, without an engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from prefix_blocks import SHAPE, SIZE, coded_blocks, key, plans, stock_caches, stock_pages

from kvq_cli.vllm.prefix_store.planning import Planner
from kvq_cli.vllm.prefix_store.store import PrefixStore
from kvq_cli.vllm.prefix_store.transfers import Transfers, WrongBlocks


class FakeEngine:
    """Caches of random numbers in which a block is computed by writing what its hash stands for."""

    def __init__(self, folder, layer_plans=None, least=list):
        self.store = PrefixStore(folder, "mine")
        self.caches = stock_caches(20, seed=9)
        self.blocks = coded_blocks(stock_pages(self.caches), layer_plans, 0)
        self.planner, self.transfers = Planner([self.store], SIZE), Transfers(self.store, self.blocks, SIZE, least)
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


def test_a_block_that_one_rank_lacks_is_lost_to_all(tmp_path):
    """The other rank computes from its part, too, with sums over the heads of both."""
    shared = threading.Barrier(2, timeout=60)
    counts = {}

    def least(numbers):
        counts[threading.get_ident()] = numbers
        shared.wait()
        found = [min(column) for column in zip(*counts.values(), strict=True)]
        shared.wait()
        return found

    folders, r1 = (tmp_path / "0", tmp_path / "1"), request(1, 6 * SIZE)
    for folder in folders:
        first = FakeEngine(folder)
        first.begin(request(1, 4 * SIZE), [0, 1, 2, 3])
        first.step(r1=(0, 4 * SIZE))
    ranks = [FakeEngine(folder, least=least) for folder in folders]
    for rank in ranks:
        assert rank.begin(r1, [10, 11, 12, 13, 14, 15]) == 4 * SIZE
    ranks[1].store.path(key(102)).unlink()
    with ThreadPoolExecutor(2) as pool:
        lost = list(pool.map(lambda rank: rank.step(r1=(4 * SIZE, 5 * SIZE)), ranks))
    assert lost == [{12, 13}] * 2
    for rank in ranks:
        assert rank.holds("r1", 1) and key(104) not in rank.store
        rank.step(r1=(2 * SIZE, 6 * SIZE))  # vLLM computes again
        assert all(key(100 + index) in rank.store for index in range(6))


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


def test_blocks_computed_from_a_failed_load_are_not_stored():
    wrong = WrongBlocks()
    assert wrong.computed(prefix=[1, 2], written=[3])
    wrong.add([2])
    assert not wrong.computed(prefix=[1, 2], written=[3])
    assert not wrong.computed(prefix=[3], written=[4])  # what was computed from them is as wrong
    assert wrong.computed(prefix=[1], written=[2, 3])  # computed again
    assert wrong.computed(prefix=[1, 2, 3], written=[5])
    assert not wrong.computed(prefix=[4], written=[])
