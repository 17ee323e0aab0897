"""F1 and covering of change point detectors on labelled series, with the scorer of TCPDBench.

    python benchmarks/verdicts/labelled.py                    # synthetic series
    python benchmarks/verdicts/labelled.py --shapes           # levels that return or settle
    python benchmarks/verdicts/labelled.py --annotated        # like those of a database's CI
    python benchmarks/verdicts/labelled.py --ci               # the same by kind of noise
    python benchmarks/verdicts/labelled.py --tcpd FOLDER      # public ones, docs/labelled-series.md
    python benchmarks/verdicts/labelled.py --without-rules    # ours alone, with each rule off

Ours decides in hindsight, of series with known steps on all from half a percent on, as these are.
`--ours` leaves the others out. FOLDER holds annotations.json (indices by series and annotator) and,
anywhere below, <series>.json in the format of the Turing Change Point Dataset. There are tables for
its series whose level jumps, for its other series in the repository, and for all further ones.
apache-otava is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from annotated_series import annotated_series
from ci_series import DEVELOPMENT as DEVELOPMENT_NOISES
from ci_series import HELD_OUT, ci_series
from made_series import NOISES, SHAPES, made_series, made_shape
from numpy.typing import NDArray
from yardsticks import DETECTORS, SMALLEST, Detector, ours, ours_from

Floats = NDArray[np.float64]
Annotations = Mapping[str, Sequence[int]]
Labelled = tuple[str, Floats, Annotations]

MARGIN = 5
SERIES = 40  # of each noise
# Series of one dimension in the Turing Change Point Dataset: control charts, a river before and
# after a dam, layers of rock; and prices, populations, passengers, emissions.
STEP_LIKE = ("nile", *(f"quality_control_{chart}" for chart in range(1, 6)), "well_log")
OTHERS = (
    *("bank", "brent_spot", "businv", "centralia", "children_per_woman", "co2_canada"),
    *("construction", "debt_ireland", "gdp_argentina", "gdp_croatia", "gdp_iran", "gdp_japan"),
    *("global_co2", "homeruns", "jfk_passengers", "lga_passengers", "ozone", "rail_lines"),
    *("seatbelts", "shanghai_license", "uk_coal_employ", "unemployment_nl", "us_population"),
    "usd_isk",
)
# Every second one by name: only their errors were examined. The rest is held out.
DEVELOPMENT = frozenset(sorted((*STEP_LIKE, *OTHERS))[::2])
ANNOTATED = 200
CI_SERIES = 40  # of each noise, a third of them short
_MIN_LONG_CI_LENGTH = 250  # values
_MIN_LONG_LENGTH = 120  # values
MAX_DISTANCE = 5  # a finding further from every annotator's marks is false


def f1(annotations: Annotations, changes: Sequence[int], margin: int = MARGIN) -> float:
    """F1 with the start of the series as a change that everybody knows (van den Burg and Williams
    2020, section 4.2): precision against all annotators together, recall averaged over them."""
    predicted = {0, *changes}
    truth = {name: {0, *marks} for name, marks in annotations.items()}
    together = set().union(*truth.values())
    precision = _matched(together, predicted, margin) / len(predicted)
    recall = float(np.mean([_matched(own, predicted, margin) / len(own) for own in truth.values()]))
    return 2 * precision * recall / (precision + recall)


def _matched(truth: set[int], predicted: set[int], margin: int) -> int:
    """Count the marks that have a finding of their own within the margin."""
    left, count = set(predicted), 0
    for mark in sorted(truth):
        near = [change for change in left if abs(change - mark) <= margin]
        if near:
            left.remove(min(near, key=lambda change: abs(change - mark)))
            count += 1
    return count


def covering(annotations: Annotations, changes: Sequence[int], size: int) -> float:
    """Return the covering of each annotator's segments (Arbelaez et al. 2010), averaged."""
    mine = _segments(changes, size)
    return float(np.mean([_cover(_segments(marks, size), mine) for marks in annotations.values()]))


def _segments(marks: Sequence[int], size: int) -> list[tuple[int, int]]:
    ends = sorted({0, size, *(mark for mark in marks if 0 < mark < size)})
    return list(pairwise(ends))


def _cover(truth: list[tuple[int, int]], mine: list[tuple[int, int]]) -> float:
    total = 0.0
    for start, stop in truth:
        best = 0.0
        for other, end in mine:
            both = max(min(stop, end) - max(start, other), 0)
            best = max(best, both / (stop - start + end - other - both))
        total += (stop - start) * best
    return total / truth[-1][1]


def public(folder: Path) -> Iterator[tuple[str, Floats, Annotations]]:
    """Series of one dimension in the format of TCPD that have annotations, by name."""
    annotations = json.loads((folder / "annotations.json").read_text(encoding="utf-8"))
    for path in sorted(folder.rglob("*.json"), key=lambda path: path.stem):
        if path.stem not in annotations:
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("n_dim", 1) == 1:
            raw = data["series"][0]["raw"]
            values = np.array(
                [np.nan if value is None else value for value in raw], dtype=np.float64
            )
            yield path.stem, values, annotations[path.stem]


def public_parts(folder: Path) -> Iterator[tuple[str, list[Labelled]]]:
    """Titles and series of each part, grouped into development and held-out series."""
    everything = list(public(folder))
    known = {*STEP_LIKE, *OTHERS}
    for title, belongs in (
        ("levels that jump", STEP_LIKE.__contains__),
        ("others of the dataset", OTHERS.__contains__),
        ("further ones", lambda name: name not in known),
    ):
        part: list[Labelled] = [
            ("development" if name in DEVELOPMENT else "held out", values, marks)
            for name, values, marks in everything
            if belongs(name)
        ]
        if part:
            yield title, part


def made() -> Iterator[Labelled]:
    for noise in NOISES:
        for number in range(SERIES):
            values, places = made_series(noise, number)
            yield noise, values, {"made": places}


def shapes() -> Iterator[Labelled]:
    for shape in SHAPES:
        for number in range(SERIES):
            values, places = made_shape(shape, number)
            yield shape, values, {"made": places}


def annotated() -> Iterator[Labelled]:
    """The odd numbers: rules were tuned on even ones."""
    for number in range(1, 2 * ANNOTATED, 2):
        values, marks = annotated_series(number)
        yield "short" if values.size < _MIN_LONG_LENGTH else "long", values, marks


def ci_parts() -> Iterator[tuple[str, list[Labelled]]]:
    """Titles and series of kinds of noise that were seen in development and of others, by size."""
    for title, kinds in (("development", DEVELOPMENT_NOISES), ("held out", HELD_OUT)):
        series = [(kind, *ci_series(kind, number)) for kind in kinds for number in range(CI_SERIES)]
        yield (
            f"{title}, under 250 values",
            [item for item in series if item[1].size < _MIN_LONG_CI_LENGTH],
        )
        yield (
            f"{title}, 500 to 2,000 values",
            [item for item in series if item[1].size >= _MIN_LONG_CI_LENGTH],
        )


def among_annotators(series: Sequence[Labelled]) -> tuple[float, float]:
    """F1 and covering of each annotator, judged by the others."""
    scores = [
        (f1(others, own), covering(others, own, values.size))
        for _, values, marks in series
        for name, own in marks.items()
        for others in [{other: marks[other] for other in marks if other != name}]
        if others
    ]
    return tuple(np.mean(scores, axis=0).tolist()) if scores else (float("nan"), float("nan"))


def detections(detect: Detector, values: Floats) -> list[int]:
    """Indices of the changes in the series as given, with its gaps."""
    usable = np.flatnonzero(np.isfinite(values))
    return [int(usable[index]) for index in detect(values[usable])]


def without_rules(own: Detector) -> dict[str, Detector]:
    """Ours, and ours with each rule of the sequential benchmark switched off."""
    from sequential import RULES, constants  # it imports this module

    def detector(changes: dict[str, float]) -> Detector:
        def detect(values: Floats) -> list[int]:
            with constants(changes):
                return own(values)

        return detect

    return {"level model": own} | {
        f"without: {name}": detector(changes) for name, changes in RULES.items()
    }


def score(series: Sequence[Labelled], detectors: Mapping[str, Detector]) -> None:
    out = sys.stdout.write
    groups = list(dict.fromkeys(name for name, _, _ in series))
    out("| detector | F1 | covering | false / 1,000 values | s |\n")
    out("| --- | ---: | ---: | ---: | ---: |\n")
    by_group: dict[str, dict[str, float]] = {}
    for name, detect in detectors.items():
        scores: list[tuple[str, float, float]] = []
        false = values_seen = 0
        start = time.process_time()
        try:
            results = [detections(detect, values) for _, values, _ in series]
        except ImportError:
            continue
        taken = time.process_time() - start
        for (group, values, marks), changes in zip(series, results, strict=True):
            scores.append((group, f1(marks, changes), covering(marks, changes, values.size)))
            every = [mark for own in marks.values() for mark in own]
            false += sum(
                all(abs(change - mark) > MAX_DISTANCE for mark in every) for change in changes
            )
            values_seen += values.size
        means = [float(np.mean([row[i] for row in scores])) for i in (1, 2)]
        rate = 1000 * false / values_seen
        out(f"| {name} | {means[0]:.3f} | {means[1]:.3f} | {rate:.2f} | {taken:.1f} |\n")
        sys.stdout.flush()
        by_group[name] = {
            group: float(np.mean([row[1] for row in scores if row[0] == group])) for group in groups
        }
    of_people = among_annotators(series)
    if np.isfinite(of_people[0]):
        out(f"| an annotator by the others | {of_people[0]:.3f} | {of_people[1]:.3f} | | |\n")
    out(f"\n| F1 | {' | '.join(by_group)} |\n| --- |{' ---: |' * len(by_group)}\n")
    for group in groups:
        cells = " | ".join(f"{means[group]:.3f}" for means in by_group.values())
        out(f"| {group} | {cells} |\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tcpd", type=Path, metavar="FOLDER")
    for family in (annotated, shapes):
        parser.add_argument(
            f"--{family.__name__}", action="store_const", const=family, default=made, dest="family"
        )
    parser.add_argument("--ci", action="store_true")
    parser.add_argument("--without-rules", action="store_true")
    parser.add_argument("--ours", action="store_true")
    arguments = parser.parse_args()
    is_known = not (arguments.ci or arguments.tcpd) and arguments.family is not annotated
    own = ours_from(SMALLEST) if is_known else ours
    others = without_rules(own) if arguments.without_rules else DETECTORS
    detectors = {**others, "level model": own}
    if arguments.ours:
        detectors = {"level model": own}
    if arguments.ci or arguments.tcpd is not None:
        for title, part in ci_parts() if arguments.ci else public_parts(arguments.tcpd):
            sys.stdout.write(f"\n{title}: {len(part)} series\n\n")
            score(part, detectors)
    else:
        score(list(arguments.family()), detectors)


if __name__ == "__main__":
    main()
