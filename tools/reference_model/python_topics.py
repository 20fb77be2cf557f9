"""Write the built-in text `pydoc` from the topics of the Python that runs this: they differ between its versions.

    python tools/reference_model/python_topics.py kvq_cli/reference/data/pydoc.txt.xz

Results on `pydoc` belong to the file that they were made with. The one of kvq is Python 3.11.7's.
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Mapping
from pathlib import Path

from kvq_cli.reference import DOCUMENT_END


def splits(topics: Mapping[str, str]) -> list[str]:
    """The texts of the splits `calibration` and `evaluation`: every other topic each.

    Topics quote each other: the evaluation split omits paragraphs of the calibration split.
    """
    halves = ([topics[name] for name in sorted(topics)[half::2]] for half in (0, 1))
    calibration, evaluation = ("\n\n".join(half).split("\n\n") for half in halves)
    seen = set(calibration)
    return ["\n\n".join(calibration), "\n\n".join(each for each in evaluation if each not in seen)]


if __name__ == "__main__":
    from pydoc_data.topics import topics

    Path(sys.argv[1]).write_bytes(lzma.compress(DOCUMENT_END.join(splits(topics)).encode(), preset=9))
