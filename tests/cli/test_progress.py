"""Progress without a terminal: one line per interval."""

from __future__ import annotations

import re

import pytest

from flexq_bench.cli.progress import progress


def test_quick_block_prints_nothing(capsys):
    with progress("comparing", 3, interval_s=5) as bar:
        for _ in range(3):
            bar.advance("a case")

    assert capsys.readouterr().err == ""


@pytest.fixture
def await_line(capsys, eventually):
    """await_line(pattern): waits until a line matches; returns all that came since the last."""

    def wait(pattern):
        shown = []

        def has_come():
            shown.append(capsys.readouterr().err)
            return re.search(f"^{pattern}$", "".join(shown), re.MULTILINE)

        eventually(has_come)
        return "".join(shown)

    return wait


def test_progress_line_has_steps_elapsed_and_remaining_time(await_line):
    with progress("comparing", 4, interval_s=0.05) as bar:
        bar.advance("cublas-fp16 gemm")
        for _ in range(2):
            await_line(r"cublas-fp16 gemm: 1 of 4 in \d+ s, about \d+ s left")


def test_unknown_total_shows_no_remaining_time(await_line):
    with progress("measuring", interval_s=0.05) as bar:
        await_line(r"measuring: not a step done yet in \d+ s")
        bar.advance("one")
        await_line(r"one: 1 done in \d+ s")


def test_extra_steps_raise_the_total(await_line):
    with progress("comparing", 1, interval_s=0.05) as bar:
        bar.advance("one")
        bar.advance("two")
        await_line(r"two: 2 of 2 in \d+ s, about 0 s left")


def test_progress_escapes_control_characters(await_line):
    with progress("\x1b[31mred", interval_s=0.05):
        assert "\x1b" not in await_line(".*red.*")
