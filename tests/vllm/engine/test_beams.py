"""vLLM's beam search, whose beams are requests that share prefixes, finds the beams of a search without any cache."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import BeamSearchParams

from kvq_cli import attach, load_artifact
from kvq_cli.methods.registry import build_parsed

WIDTH, NEW = 3, 14


def searched(model, attachable, prompt):
    """(tokens, log-probability) of the `WIDTH` best beams: each is read anew, as if it were decoded alone."""
    beams = [([], 0.0)]
    with attach(model, attachable, prefill="compressed") as attached, torch.no_grad():
        for _ in range(NEW):
            grown = []
            for tokens, score in beams:
                cache = attached.new_cache()
                logits = model(torch.tensor([prompt + tokens]), past_key_values=cache).logits[0, -1]
                best = logits.double().log_softmax(-1).topk(WIDTH)
                found = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                grown += [([*tokens, i], score + p) for p, i in found]
            beams = sorted(grown, key=lambda beam: -beam[1])[:WIDTH]
    return beams


@pytest.fixture
def with_tokenizer(folder):
    """Beam search asks for a tokenizer, to know where texts end."""
    words = {f"w{i}": i for i in range(512)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")), eos_token="w1")
    tokenizer.save_pretrained(folder)


@pytest.mark.usefixtures("with_tokenizer")
@pytest.mark.parametrize("method", ["kivi:sinks=5:recent=0", "temporalkv"])
def test_beams_equal_those_of_a_search_without_a_cache(method, case, start, model, prompts):
    asked = [prompts[i] for i in (0, 1, 4)]
    served = case(method).served
    attachable = served.method if served.artifact is None else load_artifact(served.artifact.path)
    expected = [searched(model, attachable, prompt) for prompt in asked]
    parameters = BeamSearchParams(beam_width=WIDTH, max_tokens=NEW, ignore_eos=True)
    with start(method, skip_tokenizer_init=False, max_logprobs=2 * WIDTH) as engine:
        outputs = engine.llm.beam_search([{"prompt_token_ids": prompt} for prompt in asked], parameters)
        for output, prompt, beams in zip(outputs, asked, expected, strict=True):
            assert [beam.tokens[len(prompt) :] for beam in output.sequences] == [tokens for tokens, _ in beams]
            found = [beam.cum_logprob for beam in output.sequences]
            assert found == pytest.approx([score for _, score in beams], abs=1e-3)
        assert engine.free_blocks == engine.all_blocks
    assert len({tuple(tokens) for beams in expected for tokens, _ in beams}) == 3 * WIDTH
    exact = [searched(model, build_parsed("fp16"), prompt) for prompt in asked]
    assert all(beams != others for beams, others in zip(expected, exact, strict=True))
