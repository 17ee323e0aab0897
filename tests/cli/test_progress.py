"""Without a terminal: a line every few seconds with what is left; nothing for what is quick."""

from __future__ import annotations

import re
import time

from flexq_bench.cli.progress import progress


def test_what_is_quick_says_nothing(capsys):
    with progress("comparing", 3, interval_s=5) as bar:
        for _ in range(3):
            bar.advance("a case")

    assert capsys.readouterr().err == ""


def test_a_line_says_what_how_many_for_how_long_and_what_is_left(capsys):
    with progress("comparing", 4, interval_s=0.2) as bar:
        bar.advance("cublas-fp16 gemm")
        time.sleep(0.5)

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"cublas-fp16 gemm: 1 of 4 in \d s, about \d s left", lines[0])


def test_where_nobody_knows_how_many_there_are_nothing_is_predicted(capsys):
    with progress("measuring", interval_s=0.2) as bar:
        time.sleep(0.3)
        bar.advance("one")
        time.sleep(0.2)

    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first == "measuring: not a step done yet in 0 s"
    assert "one: 1 done in" in second


def test_more_steps_than_expected_make_the_total_more(capsys):
    with progress("comparing", 1, interval_s=0.2) as bar:
        bar.advance("one")
        bar.advance("two")
        time.sleep(0.3)

    assert "two: 2 of 2 in" in capsys.readouterr().err


def test_control_characters_of_a_name_do_not_reach_the_terminal(capsys):
    with progress("\x1b[31mred", interval_s=0.1):
        time.sleep(0.2)

    assert "\x1b" not in capsys.readouterr().err
