"""The built-in text `pydoc`: how it is cut from the topics of Python, and that it is the same with every version."""

import hashlib

from reference_model.python_topics import splits

from kvq_cli import reference

PYDOC_SHA256 = "bb63e927873032b74e6c14265f7f581ca4a37ac7b8b5491f261fda1aebec1126"


def test_every_other_topic_is_for_evaluation_without_paragraphs_of_the_others():
    topics = {"c": "third\n\nshared", "a": "first\n\nshared", "b": "second\n\nshared\n\nend"}
    assert splits(topics) == ["first\n\nshared\n\nthird\n\nshared", "second\n\nend"]


def test_the_shipped_text_is_the_one_of_all_results():
    text = "".join(map(reference.pydoc, reference.SPLITS))
    assert hashlib.sha256(text.encode()).hexdigest() == PYDOC_SHA256
