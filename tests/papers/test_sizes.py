"""Counted cache sizes, against those that the papers print."""

import pytest

from kvq_cli.papers.sizes import compare_sizes


@pytest.mark.slow
def test_counted_sizes_agree_with_the_printed_ones():
    """Within the rounding of the printed number and 5 %, with three exceptions: Table 7 leaves out the indices of
    outliers, Llama-2-7B's centroids in Table 13 contradict the formula that fits the other models, and InnerQ's Table 1
    prints KIVI's sizes (3 bits per number) for InnerQ: its 2 bits take 3.5, with the sign inside 2.5."""
    for row in compare_sizes():
        differs = row["table"] == "7" or (row["shape"], row["table"]) == ("llama-2-7b", "13")
        averaged = row["figure"] in ("MB", "ratio %")  # the papers average over lengths; kvq counts a single length
        printed = 0.5 * 10 ** -len(str(row["published"]).partition(".")[2])
        allowed = printed + (0.1 if averaged else 0.05) * row["published"]
        if row["method"] == "innerq-2bit:sign=inside":
            assert 2.5 <= row["report"].packed_bits < 2.6 and 0.8 < row["counted"] / row["published"] < 1
            continue
        assert differs or abs(row["counted"] - row["published"]) <= allowed, row
