"""Several threads use one attached model, each with caches of its own."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvq_cli.attention.attach import attach
from kvq_cli.attention.score_form import PLAIN
from kvq_cli.attention.span_backend import SpanBackend
from kvq_cli.attention.triton_backend import TritonBackend
from kvq_cli.methods.registry import build_parsed

THREADS, RUNS, NEW = 4, 6, 5
#: Keys after and before RoPE, a state of the prompt, layer inputs, and a sum over layers.
METHODS = ["fp16", "kivi:group=8:residual=16", "kivi:group=8:residual=16:pre_rope=on", "innerq:group=16", "zipcache"]
METHODS += ["xquant", "xquant-cl"]


@pytest.fixture(scope="module")
def model(tiny):
    """A layer input that is smaller than keys and values, which XQuant caches without an artifact."""
    return tiny("llama", num_key_value_heads=4)


def prompt(number: int) -> torch.Tensor:
    """Prompts differ in their numbers of tokens and rows."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, 97, (1 + number % 2, 20 + 3 * number), generator=generator)


def logits(model, kv, number: int, compressed: bool = True) -> torch.Tensor:
    """Of greedy decoding, `[rows, NEW, vocabulary]`."""
    ids = prompt(number)
    options = {"past_key_values": kv.new_cache()} if compressed else {}
    with torch.no_grad():
        out = model.generate(
            ids, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
        )
    return torch.stack(out.logits, dim=1)


@pytest.fixture
def pauses(model):
    """A random pause before each layer, in which other threads run."""
    draw = random.Random(0)
    hook = lambda *_: time.sleep(draw.random() / 500)  # noqa: E731
    handles = [layer.register_forward_pre_hook(hook) for layer in model.model.layers]
    yield
    for handle in handles:
        handle.remove()


def in_threads(task, numbers) -> list:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(task, numbers))


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_one_thread(model, method):
    with attach(model, build_parsed(method), backend="torch") as kv:
        expected = [logits(model, kv, number) for number in range(RUNS)]
        found = in_threads(lambda number: logits(model, kv, number), range(RUNS))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("pauses")
def test_passes_without_a_cache_run_beside_compressed_ones(model):
    with attach(model, build_parsed("kivi:group=8:residual=16"), backend="torch") as kv:
        tasks = [(number, number % 2 == 0) for number in range(RUNS)]
        expected = [logits(model, kv, number, compressed) for number, compressed in tasks]
        found = in_threads(lambda task: logits(model, kv, *task), tasks)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("pauses")
def test_two_attached_models_and_a_plain_one(model, tiny):
    other, plain = tiny("qwen3"), tiny("llama")
    kivi, innerq = build_parsed("kivi:group=8:residual=16"), build_parsed("innerq:group=16")
    with attach(model, kivi, backend="torch") as one, attach(other, innerq, backend="torch") as two:
        runs = [(model, one, True), (other, two, True), (plain, None, False)] * 2
        expected = [logits(m, kv, number, used) for number, (m, kv, used) in enumerate(runs)]
        found = in_threads(lambda run: logits(run[1][0], run[1][1], run[0], run[1][2]), list(enumerate(runs)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_models_are_attached_in_threads(tiny):
    """What an attach finds out by a pass of its own is not lost where another ends meanwhile."""
    models, together = [tiny("gemma2") for _ in range(2)], threading.Barrier(2)
    for model, wait in zip(models, (0.0, 0.2), strict=True):

        def pause(*_: object, wait: float = wait) -> None:
            together.wait(60)
            time.sleep(wait)

        model.model.layers[0].register_forward_pre_hook(pause)

    def forms(model) -> list:
        with attach(model, build_parsed("kivi:group=8:residual=16"), backend="torch") as kv:
            return [layer.score_form for layer in kv.layers]

    found = in_threads(forms, models)
    assert all(form is not PLAIN and form.softcap for each in found for form in each)


def test_one_by_one_is_for_the_thread_that_asks(model):
    """A block in one thread changes no pass of another."""
    ids, entered, done = prompt(1), threading.Event(), threading.Event()
    with attach(model, build_parsed("kivi:group=8:residual=16"), backend="torch") as kv, torch.no_grad():
        expected = model(ids, past_key_values=kv.new_cache()).logits

        def hold() -> None:
            with kv.one_by_one():
                entered.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait(60)
        found = model(ids, past_key_values=kv.new_cache()).logits
        done.set()
        thread.join()
        with kv.one_by_one():
            changed = model(ids, past_key_values=kv.new_cache()).logits
    assert torch.equal(found, expected) and not torch.equal(changed, expected)


def test_each_thread_counts_on_tensors_of_its_own():
    backend, together = TritonBackend(), threading.Barrier(THREADS)
    found = in_threads(lambda _: (together.wait(), backend._counts, backend._tables), range(THREADS))
    found.append((0, backend._counts, backend._tables))
    for place in (1, 2):
        assert len({id(each[place]) for each in found}) == THREADS + 1


def test_each_thread_sums_in_a_workspace_of_its_own():
    """The launches of an attention share it."""
    backend, together = SpanBackend(TritonBackend()), threading.Barrier(THREADS)
    found = in_threads(lambda _: (together.wait(), backend._workspace((1, 8), object))[1], range(THREADS))
    assert len(set(found)) == THREADS and backend._workspace((1, 8), object) is backend._workspace((1, 8), object)
