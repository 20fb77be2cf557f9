"""Tables at any terminal width: complete, not too wide, words not broken."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvq_cli.cli.tables import print_table

SIZES = ["method", "nominal", "measured", "cache", "x smaller", "bits by part"]
ROWS = [
    ["kivi-2bit", 2.0, 3.228, "206.6 MiB", 4.96, "codes 1.98 + scale 0.496 + zero 0.496 + unused 0.126"],
    ["temporalkv-2bit", 2.0, 2.021, "129.4 MiB", 7.91, "codes 2 + sinks 0.0156"],
]


def printed(width, columns, rows, terminal=True, **options):
    file = io.StringIO()
    print_table(Console(file=file, width=width, force_terminal=terminal, color_system=None), columns, rows, **options)
    return file.getvalue().splitlines()


def test_narrow_terminal_shows_records():
    lines = [line.rstrip() for line in printed(30, SIZES, ROWS, title="llama-3.1-8b: 8,192 tokens")]
    assert lines[0] == "llama-3.1-8b: 8,192 tokens"
    assert printed(30, ["a"], [["b"]], title="wider than what it is about")[0] == "wider than what it is about"
    assert [line for line in lines if line.startswith(("method", "cache", "x smaller"))] == [
        "method        kivi-2bit",
        "cache         206.6 MiB",
        "x smaller     4.96",
        "method        temporalkv-2bit",
        "cache         129.4 MiB",
        "x smaller     7.91",
    ]
    assert "bits by part  codes 1.98 +" in lines and "              scale 0.496 +" in lines


def test_columns_that_do_not_fit_are_printed_below_with_the_labels():
    heads, seen = [], []
    for line in printed(44, SIZES, ROWS):
        if line.strip().startswith("method"):
            heads.append(line.split()[1:])
        seen += [line.split()[0]] if "-2bit" in line else []
    assert [head[0] for head in heads] == ["nominal", "cache", "bits"]
    assert seen == ["kivi-2bit", "temporalkv-2bit"] * 3
    heads = [line.split()[:2] for line in printed(60, SIZES, ROWS, labels=2) if "method" in line]
    assert len(heads) == 2 and heads[0] == heads[1] == ["method", "nominal"]


def test_escape_sequences_of_cells_are_printed():
    lines = printed(88, ["method"], [["\x1b[2J"]], terminal=False)
    assert "\\x1b[2J" in [line.strip() for line in lines] and not any("\x1b" in line for line in lines)


def test_names_of_columns_and_titles_are_printed_as_they_are():
    """Neither a sequence for the terminal nor a change of direction, nor rich's markup."""
    name = "[red]a\u202eb\x1b[2J[/]"
    wide, narrow = ("\n".join(printed(width, [name, name], [[name, 1]], title=name)) for width in (200, 16))
    assert wide.count(r"[red]a\u202eb\x1b[2J[/]") == 4  # the title, two columns and a cell
    assert not {"\x1b", "\u202e"} & set(wide) and "[red]" in narrow
    assert "\u202e" not in narrow and "\x1b[2J" not in narrow  # its names are bold


def test_wide_terminal_shows_columns_without_broken_words():
    lines = [line.rstrip() for line in printed(88, SIZES, ROWS)]
    heads = [line.split() for line in lines if "method" in line]
    assert len(heads) == 1 and heads[0][:3] == ["method", "nominal", "measured"]
    assert {"kivi-2bit", "temporalkv-2bit"} <= {line.split()[0] for line in lines if line}


def test_pipe_has_no_width_limit():
    """One row is one line there, for grep."""
    long = ["x" * 300, "y " * 150]
    assert any(
        line.split() == " ".join(long).split() for line in printed(240, ["name", "what"], [long], terminal=False)
    )


word = st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1, max_size=18)
words = st.lists(word, min_size=1, max_size=6).map(" ".join)
tables = st.integers(1, 7).flatmap(
    lambda count: st.tuples(
        st.lists(words, min_size=count, max_size=count),
        st.lists(st.lists(words, min_size=count, max_size=count), max_size=3),
    )
)


@given(tables, st.integers(40, 160))
def test_words_are_not_broken(table, width):
    columns, rows = table
    lines = printed(width, columns, rows)
    assert max(map(len, lines), default=0) <= width
    found = " ".join(lines).split()
    for cell in [text for row in rows for text in row]:
        assert all(one in found for one in cell.split())
    if rows:
        assert all(one in found for column in columns for one in column.split())
