"""Fixtures: a small trained tokenizer, text sources of RULER, and a tiny random model."""

import pytest

from kvq_cli.reference import prompts, prose


@pytest.fixture(scope="session")
def tokenizer():
    from reference_model.tokenizer import BOS, EOS, PAD, build
    from transformers import PreTrainedTokenizerFast

    forms = [prompts.NOISE, prompts.needle("calm-oak", "1234567"), prompts.question("numbers", ["calm-oak", "odd-cup"])]
    built = build([prose("calibration")[:200_000], *forms * 50], vocabulary=2048)
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token=BOS, eos_token=EOS, pad_token=PAD)


@pytest.fixture(scope="session")
def sources():
    from kvq_cli.evaluation.ruler.families import Sources
    from kvq_cli.evaluation.ruler.haystack import Haystack
    from kvq_cli.evaluation.ruler.questions import question_source

    return Sources(Haystack(prose("evaluation"), "prose"), question_source([], 0))


@pytest.fixture(scope="session")
def make_samples(tokenizer, sources):
    """Samples of a task by name."""
    from kvq_cli.evaluation.ruler.samples import RulerSamples
    from kvq_cli.evaluation.ruler.tasks import ruler_task
    from kvq_cli.evaluation.ruler.templates import select_templates

    def make(task, context=1024, wording="reference", seed=0):
        return RulerSamples(ruler_task(task), context, tokenizer, select_templates(wording, ""), sources, seed)

    return make


@pytest.fixture(scope="session")
def loaded(tokenizer):
    """A random two-layer Llama in float32 with the tokenizer above."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvq_cli.models import LoadedModel, model_shape

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, "tiny", None, model_shape(model))


@pytest.fixture
def interrupt_after():
    """`track=interrupt_after(3)`: Ctrl-C when so many samples are done."""

    def make(after):
        done = 0

        def interrupt(what, total, found):
            def advance(count):
                nonlocal done
                done += count
                if done >= after:
                    raise KeyboardInterrupt

            return advance

        return interrupt

    return make
