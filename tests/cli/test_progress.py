"""Progress without a terminal: one line per interval."""

from __future__ import annotations

import re
import time

from flexq_bench.cli.progress import progress


def test_quick_block_prints_nothing(capsys):
    with progress("comparing", 3, interval_s=5) as bar:
        for _ in range(3):
            bar.advance("a case")

    assert capsys.readouterr().err == ""


def test_progress_line_has_steps_elapsed_and_remaining_time(capsys):
    with progress("comparing", 4, interval_s=0.2) as bar:
        bar.advance("cublas-fp16 gemm")
        time.sleep(0.5)

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"cublas-fp16 gemm: 1 of 4 in \d s, about \d s left", lines[0])


def test_unknown_total_shows_no_remaining_time(capsys):
    with progress("measuring", interval_s=0.2) as bar:
        time.sleep(0.3)
        bar.advance("one")
        time.sleep(0.2)

    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first == "measuring: not a step done yet in 0 s"
    assert "one: 1 done in" in second


def test_extra_steps_raise_the_total(capsys):
    with progress("comparing", 1, interval_s=0.2) as bar:
        bar.advance("one")
        bar.advance("two")
        time.sleep(0.3)

    assert "two: 2 of 2 in" in capsys.readouterr().err


def test_progress_escapes_control_characters(capsys):
    with progress("\x1b[31mred", interval_s=0.1):
        time.sleep(0.2)

    assert "\x1b" not in capsys.readouterr().err
