"""Published tables, statements and contradictions, and the names that they have here."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.published import (
    get_paper,
    published_papers,
    read_paper,
    select_tables,
)

FILE = resources.files("flexq_bench") / "workloads" / "published" / "flexq.toml"


def test_files_have_every_number_of_the_papers():
    tables = select_tables(None)
    cells = [cell for _, table in tables for cell in table.cells()]

    assert len(tables) == 42
    assert sum(len(table.rows) for _, table in tables) == 532
    assert sum(cell.value is not None for cell in cells) == 4119
    assert sum(len(paper.statement) for paper in published_papers()) == 115
    assert sum(len(paper.mismatch) for paper in published_papers()) == 51


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('["cublas-w8a8", "cublas", 37.02, 0.91]', '["cublas-w8a8", 37.02, 0.91]', "4 cells"),
        ("37.02, 0.91]", '"fast", 0.91]', 'a number, "-" or "\\?"'),
        ("value = 2.46", "low = 2.46", "either value, or low and high"),
        ('kind = "misprint"', 'kind = "typo"', "kind"),
        ('measures = "time', 'measure = "time', "measure"),
        ('id = "table-6"', 'id = "table-5"', "two tables are called table-5"),
    ],
)
def test_a_damaged_file_is_refused_with_the_entry(tmp_path, old, new, complaint):
    text = FILE.read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "flexq.toml"
    file.write_text(text.replace(old, new), encoding="utf-8")

    with pytest.raises(WorkloadError, match=complaint) as refused:
        read_paper(file)
    assert "flexq.toml" in str(refused.value)


def test_unknown_paper_or_table_names_the_nearest():
    with pytest.raises(WorkloadError, match="flexq"):
        select_tables("flexg")
    with pytest.raises(WorkloadError, match="table-6"):
        select_tables("flexq/table-7")


def test_a_scheme_is_looked_up_by_all_words_first():
    paper = get_paper("zeroquant-fp6")
    (table,) = [table for table in paper.table if table.id == "table-6"]
    of = {cell.subject: paper.schemes_of(cell) for cell in table.cells()}

    assert of["W4A16 gptq coarse"] == ("gptq-w4a16[group=none]",)
    assert of["FP6-A16 rtn fine"] == ("fp6[group=256]", "fp6[group=128]")
    assert of["FP16 fp16"] == ("fp16",)


def test_mismatch_is_of_each_table_that_it_names():
    named = {
        m.where for m in get_paper("abq-llm").mismatches(select_tables("abq-llm/table-9")[0][1])
    }

    assert "tables 3, 8, 9, 10, 11" in named
    assert "table-9, W6A6, smoothquant" in named
    assert not any(where.startswith("table-3,") for where in named)


def test_mismatch_of_the_text_is_of_its_table():
    paper = get_paper("atom")
    (table,) = [table for table in paper.table if table.id == "table-4"]

    assert [m.where for m in paper.mismatches(table)] == ["section 5.4"]


@pytest.mark.parametrize(
    ("name", "where", "values"),
    [
        ("atom/table-2", "table-2, llama-7b, qllm, arc_easy and arc_challenge", [45.20, 31.14]),
        ("dgq/table-a4", "table-a4, llama-13b, smoothquant, decrease", [0.54]),
        ("flexq/table-1", "table-1, i-llm W4A4, llama-2-7b", [10.44]),
        ("abq-llm/table-6", "FP16, llama-7b, wikitext2", [5.67]),
    ],
)
def test_mismatch_marks_the_cells_of_its_place(name, where, values):
    ((paper, table),) = select_tables(name)
    (mismatch,) = [m for m in paper.mismatches(table) if m.where == where]

    assert [cell.value for cell in table.cells() if mismatch.marks(cell)] == values


def test_printed_means_of_table_b1_are_arithmetic():
    (table,) = [t for t in get_paper("zeroquant-fp6").table if t.id == "table-b.1"]
    times = {(c.at["layer"], c.at["model"], c.at["kernel"]): c.value for c in table.cells()}
    ratios = [
        value / times[layer, model, "fp6-w6a16"]
        for (layer, model, kernel), value in times.items()
        if kernel == "cublas-fp16"
    ]

    assert sum(ratios) / len(ratios) == pytest.approx(1.92, abs=0.005)


def test_settings_of_the_shared_data_are_kept():
    own = tomllib.loads(Path(str(FILE)).read_text(encoding="utf-8"))

    (table,) = [table for table in own["table"] if table["id"] == "table-6"]
    assert (table["setting"]["m"], table["setting"]["n"], table["setting"]["k"]) == (1, 4096, 4096)
    assert [row[1] for row in table["rows"]] == [
        "cublas", "vanilla", "+warp-reduction", "+pipeline", "+evict-first", "-fused-dequant",
    ]  # fmt: skip
