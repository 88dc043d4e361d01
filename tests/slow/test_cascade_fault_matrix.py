"""Whatever happens to a node, the answer is the same or an error names the node, unless its numbers are wrong."""

from collections.abc import Callable

import pytest

from hiddenlab.errors import InputError
from hiddenlab.eval.bench.faults import NODES, PHASES, bench

# A process that ends, one that stands still, numbers that are refused, and numbers that are not: 'hiddenlab bench
# cascade-faults' tries the other four as well.
TRIED = ("killed", "stalled", "NaN", "wrong numbers")

TinyPath = Callable[..., str]


def test_no_fault_gives_another_answer_without_a_word(tiny: TinyPath) -> None:
    """With nodes that are replaced the answer is the same; numbers that are well-formed and wrong are not noticed."""
    rows = bench(tiny("gemma2"), faults=",".join(TRIED), layers="last", timeout=3.0)["rows"]
    assert [(row["fault"], row["node"], row["while"]) for row in rows] == [
        (fault, node, phase) for fault in TRIED for node in NODES for phase in PHASES
    ]
    for row in rows:
        if row["fault"] == "wrong numbers":
            assert row["same_answer"] + row["other_answer"] == 1
        else:
            assert row["same_answer"] == 1, row
    assert any(row["other_answer"] for row in rows)


def test_without_replacements_each_fault_is_an_error_with_a_name(tiny: TinyPath) -> None:
    rows = bench(tiny("llama"), faults="killed", layers="1", timeout=3.0, restarts=0)["rows"]
    assert all(row["named_error"] == 1 for row in rows), rows


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"faults": "burnt"}, "unknown fault 'burnt'; known are killed"),
        ({"layers": "0"}, "layers are 1 to "),
    ],
)
def test_wrong_options_are_refused(tiny: TinyPath, options: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        bench(tiny("llama"), **options)  # type: ignore[arg-type]
