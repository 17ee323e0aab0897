"""Choosing a configuration by time, beside another commit's choice, and remembering it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from flexq_bench.kernels.autotune import TuningKey, TuningMemory, choose_fastest, preferring
from flexq_bench.kernels.contract import Config


@dataclass(frozen=True, slots=True)
class Tile(Config):
    size: int


KEY = TuningKey("flexq-w6a6", 1, 8, 4096, 4096, "gemm", "cold", "NVIDIA H200", "sources 1")
TILES = [Tile(8), Tile(16)]


class Timer:
    """Times that are given, counting how often they are asked for."""

    def __init__(self, **us_by_size):
        self.times = {int(size.removeprefix("t")): us for size, us in us_by_size.items()}
        self.asked = 0

    def __call__(self, tile):
        self.asked += 1
        return self.times[tile.size]


@pytest.mark.parametrize(
    ("favourite", "us", "chosen"),
    [
        *(({"size": 8}, us, chosen) for us, chosen in ((100, 8), (100.9, 8), (101.5, 16), (99, 8))),
        (None, 100.9, 16),
    ],
)
def test_favourite_wins_unless_another_is_1_percent_faster(favourite, us, chosen):
    times = {8: us, 16: 100.0}
    timed = preferring(lambda tile: times[tile.size], favourite)

    assert choose_fastest([Tile(16), Tile(8)], timed) == Tile(chosen)


def test_choice_is_made_once_and_read_by_next_process(tmp_path):
    timer = Timer(t8=2.0, t16=1.0)
    assert TuningMemory(tmp_path).choose(KEY, TILES, timer) == Tile(16)
    assert timer.asked == 2

    turned = Timer(t8=1.0, t16=2.0)
    assert TuningMemory(tmp_path).choose(KEY, TILES, turned) == Tile(16)
    assert turned.asked == 0


@pytest.mark.parametrize(
    "change",
    [
        {"software": "sources 2"},
        {"gpu": "NVIDIA A100"},
        {"m": 16},
        {"k": 8192},
        {"version": 2},
        {"stage": "linear"},
    ],
)
def test_choice_depends_on_every_field_of_its_key(tmp_path, change):
    TuningMemory(tmp_path).choose(KEY, TILES, Timer(t8=2.0, t16=1.0))

    timer = Timer(t8=1.0, t16=2.0)
    assert TuningMemory(tmp_path).choose(replace(KEY, **change), TILES, timer) == Tile(8)


def test_fresh_memory_times_again_and_overwrites_disk(tmp_path):
    TuningMemory(tmp_path).choose(KEY, TILES, Timer(t8=2.0, t16=1.0))
    fresh = TuningMemory(tmp_path, fresh=True)
    assert fresh.choose(KEY, TILES, Timer(t8=1.0, t16=2.0)) == Tile(8)

    assert TuningMemory(tmp_path).choose(KEY, TILES, Timer(t8=9.0, t16=1.0)) == Tile(8)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"config": {"size": 64}}', '{"key": 1}'])
def test_damaged_or_outdated_file_is_replaced(tmp_path, content):
    TuningMemory(tmp_path).choose(KEY, TILES, Timer(t8=2.0, t16=1.0))
    (file,) = tmp_path.rglob("*.json")
    file.write_text(content)

    assert TuningMemory(tmp_path).choose(KEY, TILES, Timer(t8=1.0, t16=2.0)) == Tile(8)


def test_a_memory_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    TuningMemory().choose(KEY, TILES, Timer(t8=2.0, t16=1.0))

    assert not list(tmp_path.rglob("*"))


def test_only_candidates_near_the_coarse_best_are_timed():
    timer = Timer(t8=100.0, t16=99.0)
    glances = Timer(t8=100.0, t16=103.0, t32=105.0)

    assert choose_fastest([*TILES, Tile(32)], timer, glances) == Tile(16)
    assert (timer.asked, glances.asked) == (2, 3)


def test_single_near_candidate_is_not_timed_again():
    timer = Timer()

    assert choose_fastest(TILES, timer, Timer(t8=100.0, t16=110.0)) == Tile(8)
    assert timer.asked == 0


def test_failing_candidate_is_skipped_unless_all_fail():
    def glance(tile):
        if tile.size == 8:
            raise RuntimeError("too much shared memory")
        return 100.0

    assert choose_fastest(TILES, Timer(t16=1.0), glance) == Tile(16)
    with pytest.raises(RuntimeError, match="too much shared memory"):
        choose_fastest([Tile(8)], Timer(), glance)
