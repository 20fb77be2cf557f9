"""Teacher-forced logits of every method: equal to token-by-token decoding, independent of later tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tiers import fast

from kvq_cli import attach, build, load_artifact
from kvq_cli.artifact import Artifact
from kvq_cli.cache import cross_layer
from kvq_cli.calibration.pipeline import calibrate
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.evaluation.perplexity import PerplexityEvaluation
from kvq_cli.evaluation.scoring import continuation_logits
from kvq_cli.methods.base import Method, StreamPlan
from kvq_cli.methods.registry import method_names
from kvq_cli.models import load_model

ARTIFACTS = Path(__file__).parents[2] / "artifacts" / "reference"
SMALL = {"sinks": 2, "recent": 8}
METHODS = {
    "fp16": build("fp16"),
    "kivi": build("kivi", group=16, **SMALL),
    "turboquant": build("turboquant", **SMALL),
    "kvarn": build("kvarn", group=16, **SMALL),
    "oscar-omni": build("oscar-omni", group=16, **SMALL),
    "oscar": build("oscar", **SMALL),
    "llama-cpp": build("llama-cpp", **SMALL),
    "per-token-head": build("per-token-head", **SMALL),
    "quanto": build("quanto", group=16, buffer=8, **SMALL),
    "squat": build("squat", group=16, **SMALL),
    "innerq": build("innerq", **SMALL),
    "innerq-hybrid_prefill": build("innerq", mode="hybrid_prefill", **SMALL),
    "gear": build("gear", group=16, residual=16),
    "zipcache": build("zipcache", residual=16),
    "klt": build("klt", bits=1),
    "mixed": build("mixed", bits=6, keys="kivi-4bit:group=8:pre_rope=on", values="klt-1bit"),
    "palu": build("palu", **SMALL),
    "kvtc": build("kvtc", **SMALL),
    "temporalkv": "temporalkv-2bit",
    "channelkv": "channelkv-2bit",
    "kvquant": "kvquant-2bit",
    "xquant": "xquant",
    "xquant-cl": "xquant-cl",
}
PROMPT, TOKENS = 70, 230
#: Methods that `make test` compares: plain, uniform, prompt state, saliency, codebooks, layer inputs.
FAST = ("fp16", "kivi", "innerq-hybrid_prefill", "zipcache", "temporalkv", "xquant-cl")
#: Of those, with exact prefill, where prompt state and saliency come from the prompt's pass.
FAST_EXACT = ("innerq-hybrid_prefill", "zipcache")
STEPWISE = 160  #: tokens of a window that is also decoded one at a time


@pytest.fixture(scope="module")
def loaded():
    return load_model("reference", "cpu", "float32")


@pytest.fixture(scope="module")
def ids(loaded) -> list[int]:
    text = "The river rises in the hills and flows past the old town, where a bridge of stone was built long ago. "
    return loaded.tokenizer(9 * text).input_ids[:TOKENS]


@cache
def ready(loaded, name) -> Method | Artifact:
    """The method, or its artifact: from the repository, or one made of little text."""
    method = METHODS[name]
    if isinstance(method, str):
        return load_artifact(ARTIFACTS / method)
    if not method.calibrates:
        return method
    plan = plan_calibration(loaded, method, CalibrationOptions(samples=2, seqlen=400, points=256, iterations=1))
    with TemporaryDirectory() as folder:
        return calibrate(plan, Path(folder) / "artifact")


def scored(loaded, name, contexts, continuations, prefill="compressed"):
    method = ready(loaded, name)
    with attach(loaded.model, method, prefill=prefill) as kv:
        return continuation_logits(kv, contexts, continuations)


@contextmanager
def same_inputs(model) -> Iterator[Callable[[], None]]:
    """Inside the block, layer inputs, queries, keys and values of a token behind the prompt are always those of its
    first pass. The function that is given says that the next pass is the prompt again."""
    kept: dict[torch.nn.Module, torch.Tensor] = {}
    past: Counter[torch.nn.Module] = Counter()

    def hook(module, _inputs, output):
        begin, end = past[module], past[module] + output.shape[1]
        past[module], known = end, kept.get(module, output[:, :0])
        kept[module] = torch.cat([known, output[:, known.shape[1] - begin :]], dim=1)
        return kept[module][:, begin:end] if begin else output

    with ExitStack() as undo:
        for path, module in model.named_modules():
            if path.endswith(("input_layernorm", "q_proj", "k_proj", "v_proj")):
                # Before the hooks of `attach`, which hand outputs to the cache.
                undo.callback(module.register_forward_hook(hook, prepend=True).remove)
        yield past.clear


def exact_latents(plan: StreamPlan, x: torch.Tensor) -> torch.Tensor:
    """`StreamPlan.latents`, rounded alike for a token alone and among others."""
    return (x if plan.down is None else exact_linear(x, plan.down.T)).unsqueeze(1)


def exact_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().T).to(x.dtype)


def test_all_methods_are_covered():
    assert {name.split("-hybrid")[0] for name in METHODS} == set(method_names())


@pytest.mark.parametrize(
    ("name", "prefill"),
    fast(
        [*((name, "compressed") for name in FAST), *((name, "exact") for name in FAST_EXACT)],
        product(METHODS, ["compressed", "exact"]),
    ),
)
def test_one_pass_equals_token_by_token_decoding(loaded, ids, name, prefill, monkeypatch):
    """Every layer attends alike for the same inputs, at every token: those of the pass, since one code that the
    rounding of another product flips would change all later tokens."""
    ids = ids[:STEPWISE]
    monkeypatch.setattr(StreamPlan, "latents", exact_latents)
    monkeypatch.setattr(cross_layer, "linear", exact_linear)
    with torch.no_grad(), attach(loaded.model, ready(loaded, name), prefill=prefill) as kv:
        with same_inputs(loaded.model) as from_the_start:
            [whole], report = continuation_logits(kv, [ids[:PROMPT]], [ids[PROMPT:]])
            from_the_start()
            cache, steps = kv.new_cache(), []
            loaded.model(torch.tensor([ids[: PROMPT - 1]]), past_key_values=cache)
            for token in ids[PROMPT - 1 : -1]:
                steps.append(loaded.model(torch.tensor([[token]]), past_key_values=cache).logits[0, 0])
        lossless = loaded.model(torch.tensor([ids])).logits[0, PROMPT - 1 : -1]
    assert report.compressed > 0 or name == "fp16"
    error = (whole - torch.stack(steps)).abs()
    assert error.max() < 5e-4 and error.mean() < 5e-6
    if prefill == "compressed" and name != "fp16":
        assert (whole - lossless)[0].abs().max() > 1e-3  # even the first logit is of the compressed cache


@pytest.mark.parametrize("name", fast(FAST, METHODS))
def test_logits_do_not_depend_on_later_tokens(loaded, ids, name):
    """From the first scored token on, the second, one after the first packed group, and one after several."""
    prompt, continuation = ids[:PROMPT], ids[PROMPT:]
    [first], _ = scored(loaded, name, [prompt], [continuation])
    for change in (0, 1, 33, 90):
        other = [*continuation[:change], *reversed(continuation[change:])]
        assert other[change] != continuation[change]
        [second], _ = scored(loaded, name, [prompt], [other])
        # Logit i predicts token i of the continuation and sees those before it.
        torch.testing.assert_close(second[: change + 1], first[: change + 1], rtol=0, atol=0)
        assert (second[change + 1 :] - first[change + 1 :]).abs().amax(-1).min() > 1e-3


@pytest.mark.slow
def test_shared_prompts_leave_all_records_as_they_are(loaded, ids):
    windows = torch.tensor(ids[:220]).view(2, 110)
    evaluation = PerplexityEvaluation(windows, "test", 2, PROMPT, "exact")
    with ExitStack() as undo:
        attached = {name: undo.enter_context(attach(loaded.model, ready(loaded, name))) for name in METHODS}
        alone = [
            (name, json.dumps(record))
            for name, each in attached.items()
            for _, [record] in evaluation.run(loaded, {name: each}, {name: [0, 1]})
        ]
        together = evaluation.run(loaded, attached, dict.fromkeys(attached, [0, 1]))
        assert sorted((name, json.dumps(record)) for name, [record] in together) == sorted(alone)


@pytest.mark.parametrize("name", ["kivi", "innerq", "zipcache", "temporalkv"])
def test_batched_logits_equal_single_rows(loaded, ids, name):
    contexts, continuations = [ids[:PROMPT], ids[10:50], ids[:1]], [ids[PROMPT:140], ids[50:51], ids[1:40]]
    batch, _ = scored(loaded, name, contexts, continuations)
    for logits, context, continuation in zip(batch, contexts, continuations, strict=True):
        [alone], _ = scored(loaded, name, [context], [continuation])
        assert logits.shape == alone.shape == (len(continuation), loaded.model.config.vocab_size)
        error = (logits - alone).abs()
        assert error.mean() < 1e-3 and error.quantile(0.9) < 1e-3


def test_logits_of_contexts_of_several_tokens_are_not_copied(loaded, ids):
    outputs = []
    hook = loaded.model.register_forward_hook(lambda _model, _inputs, output: outputs.append(output.logits))
    try:
        rows, _ = scored(loaded, "fp16", [ids[:30], ids[:2]], [ids[30:40], ids[2:6]])
    finally:
        hook.remove()
    assert [row.untyped_storage().data_ptr() for row in rows] == 2 * [outputs[1].untyped_storage().data_ptr()]
    assert [len(row) for row in rows] == [10, 4]


def test_empty_contexts_are_refused(loaded, ids):
    with pytest.raises(ValueError, match="no tokens"):
        scored(loaded, "kivi", [[]], [ids])
