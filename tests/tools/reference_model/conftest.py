"""A small tokenizer and a small curriculum."""

import numpy as np
import pytest
from reference_model import curriculum
from reference_model.tokenizer import build

TEXT = " ".join(f"{word} {number} rivers run past the old mill." for number, word in enumerate(["Many", "Few"] * 40))


@pytest.fixture(scope="session")
def tokenizer():
    return build([TEXT, *curriculum.task_texts(1)], 600)


@pytest.fixture
def make_curriculum():
    """A function that makes a curriculum over random token ids."""

    def make(tokens=60_000):
        ids = np.random.default_rng(0).integers(3, 200, 20_000).astype(np.uint16)
        return curriculum.Curriculum(
            plan=[
                curriculum.Phase("repeats of 64", 1024, ((64, 1.0),), 256, 64),
                curriculum.Phase("mixed", tokens, ((64, 0.5), (128, 0.5)), 256),
            ],
            tokens=ids,
            encode=lambda text: [3 + ord(letter) % 197 for letter in text[::4]],
            decode=lambda ids: "Some words stand here in a row. " * (len(ids) // 10),
            vocabulary=200,
        )

    return make
