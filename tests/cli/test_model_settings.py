"""Which settings of a model's files apply to `kvq generate` and `kvq chat`."""

import json
import shutil

import pytest

from kvq_cli.cli.options import CompressionOptions, ModelOptions
from kvq_cli.cli.text_generator import Decoding, attached_generator
from kvq_cli.errors import KvqError

PROMPT = [5, 6, 7] * 4


@pytest.fixture
def answer(tiny_folder, tmp_path):
    """`answer(decoding, {"num_beams": 3})`: new tokens of a model with these settings in its files, and the notes.

    eos: the id of the tokenizer's EOS.
    """

    def run(decoding=None, settings=None, config=None, eos=None):
        folder = tmp_path / "model"
        shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
        for name, changes in (("generation_config.json", settings), ("config.json", config)):
            document = json.loads((tiny_folder / name).read_text())
            (folder / name).write_text(json.dumps(document | (changes or {})))
        model, method = (
            ModelOptions(model=str(folder), device="cpu"),
            CompressionOptions(method="kivi", set_=["group=8"]),
        )
        with attached_generator(model, method, "exact", decoding or Decoding(12)) as generator:
            if eos is not None:
                generator.loaded.tokenizer.eos_token = generator.loaded.tokenizer.convert_ids_to_tokens(eos)
            ids = generator.generate(PROMPT, generator.attached.new_cache(), lambda piece: None).ids
            return ids, generator.notes

    return run


@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False, "num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"cache_implementation": "static", "penalty_alpha": 0.6, "top_k": 4},
        {"return_dict_in_generate": True, "output_scores": True, "prompt_lookup_num_tokens": 3},
        {"stop_strings": ["a", "e"], "repetition_penalty": 3.0, "no_repeat_ngram_size": 1},
        {"do_sample": True, "temperature": 2.0, "max_length": 3, "min_new_tokens": 30, "watermarking_config": {}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_greedy_text_does_not_depend_on_the_generation_config(answer, settings):
    plain, _ = answer()
    ids, notes = answer(settings=settings)
    assert ids == plain and len(notes) == 1  # the method's


@pytest.mark.parametrize("config", [{"use_cache": False}, {"num_beams": 2}, {"repetition_penalty": 3.0}])
def test_greedy_text_does_not_depend_on_settings_in_the_config(answer, config):
    assert answer(config=config)[0] == answer()[0]


def test_sampling_takes_the_models_settings_and_says_so(answer):
    hot, settings = Decoding(12, temperature=5.0), {"top_k": 1, "top_p": 1.0, "repetition_penalty": 3.0}
    ids, [_, note] = answer(hot, settings)
    assert note.startswith("sampling as ") and note.endswith(" is configured: top_k 1, repetition_penalty 3")
    assert ids == answer(Decoding(12, temperature=0.1, top_k=1), {"repetition_penalty": 3.0})[0]
    free, notes = answer(Decoding(12, temperature=5.0, top_k=0, top_p=1.0), {"top_k": 1, "top_p": 0.1})
    assert free == answer(hot)[0] != ids and len(notes) == 1


@pytest.mark.parametrize(
    ("settings", "says"), [({"min_p": "x"}, "min_p is 'x'"), ({"repetition_penalty": -1.0}, "strictly positive")]
)
def test_sampling_names_a_setting_that_is_wrong(answer, settings, says):
    with pytest.raises(KvqError, match=f"the model's generation_config.json: .*{says}"):
        answer(Decoding(12, temperature=1.0), settings)


def test_beam_search_does_not_depend_on_the_generation_config(answer):
    beams = Decoding(12, num_beams=2)
    assert answer(beams, {"length_penalty": 9.0, "early_stopping": True})[0] == answer(beams)[0]


@pytest.mark.parametrize("source", ["settings", "config", "eos"])
def test_text_ends_at_each_eos(answer, source):
    """Of the generation config, of the config and of the tokenizer, where the others name another one."""
    plain, _ = answer()
    stop = next(place for place in range(1, 12) if plain[place] not in plain[:place])
    other = next(token for token in range(100, 300) if token not in plain)
    ends = {"settings": {"eos_token_id": [other]}, "config": {"eos_token_id": other}}
    ends[source] = plain[stop] if source == "eos" else {"eos_token_id": plain[stop]}
    assert answer(**ends)[0] == plain[: stop + 1]
