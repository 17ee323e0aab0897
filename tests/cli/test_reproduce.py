"""`flexq-bench reproduce`: what it lists and prints; nothing is measured here."""

from __future__ import annotations

from pathlib import Path

from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_all_tables_and_figures_are_listed_with_verdicts(cli):
    lines = cli("reproduce").out.splitlines()

    assert sum("/table-" in line and "can't be" in line for line in lines) == 42
    assert any(line.startswith("flexq/figure-10: ") for line in lines)


def test_table_is_printed_with_means_caveats_and_statements(cli, database):
    with open_database(str(database)) as stored, stored.session() as session:
        import_file(session, EXAMPLES / "h100" / "papers-kernels.jsonl.gz")

    printed = cli("reproduce", "zeroquant-fp6/table-b.1").out

    assert "mean speed-up" in printed
    assert "1.918" in printed
    assert "caveat: averages are arithmetic" in printed


def test_numbers_that_the_paper_leaves_out_are_not_printed(cli, database):
    with open_database(str(database)) as stored, stored.session() as session:
        import_file(session, EXAMPLES / "h200" / "papers-kernels.jsonl.gz")

    ran = cli("reproduce", "abq-llm/table-13")

    assert ran.code == 0
    assert "1 8192 1024 cublas W2A6" in ran.out
    assert "1 8192 1024 cublas W2A2" not in ran.out


def test_figure_is_printed_with_what_the_text_states(cli):
    printed = cli("reproduce", "atom/figure-11").out

    assert "up to 7.7 x" in printed
    assert "caveat: at equal memory" in printed


def test_figure_without_a_measurement_says_where_its_numbers_are(cli):
    printed = cli("reproduce", "atom/figure-2")

    assert "a figure without numbers" in printed.err
    assert "its numbers are table-3's" in printed.out


def test_text_that_no_table_has_is_refused(cli, tmp_path):
    (tmp_path / "mine.txt").write_text("words")
    (tmp_path / "wiki.raw").write_text("words\n")
    options = ("reproduce", "flexq/table-2", "--model", "/nowhere", "--dry-run", "--data")

    refused = cli(*options, str(tmp_path / "mine.txt"))
    taken = cli(*options, str(tmp_path / "wiki.raw"))

    assert refused.code == 2
    assert "wikitext2=" in refused.err
    assert f"--data wikitext={tmp_path / 'wiki.raw'}" in taken.err


def test_unknown_table_names_the_nearest(cli):
    ran = cli("reproduce", "flexq/table-66")

    assert ran.code == 2
    assert "table-6" in ran.err
