"""Calibration segments that lie in an evaluated text.

A scheme that learned from the text that it is evaluated on loses less there than elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexq_bench.accuracy.bos import TextTokens
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.texts import Text, tokenize
from flexq_bench.checkpoints import QuantizedCheckpoint, StoredCalibration
from flexq_bench.schemes.calibration import Calibration, calibration_segments, contained_segments
from flexq_bench.schemes.errors import QuantizeError

_REFUSED = 0.5  # share of the segments; fewer may be passages that both texts quote


@dataclass(frozen=True, slots=True)
class CalibrationOverlap:
    """found: calibration segments that the text has, of `segments`. text: its name."""

    scheme: str
    text: str
    found: int
    segments: int

    def __str__(self) -> str:
        return (
            f"{self.scheme}: {self.found} of its {self.segments} calibration segments are in "
            f"{self.text}, where it loses less than on other texts"
        )


def calibration_overlaps(
    schemes: str,
    calibration: Calibration | None,
    checkpoint: QuantizedCheckpoint | None,
    texts: Sequence[Text],
    tokens: Mapping[str, TextTokens],
    loaded: LoadedModel,
) -> list[CalibrationOverlap]:
    """Return the texts that have calibration segments. tokens: of each text by its name.

    schemes: names of those that learn from `calibration`; None: none does. A checkpoint that does
    not store its segments' hashes is compared by the hash of them all, which finds the very text
    that they were drawn from. Raises AccuracyError if a text has half of the segments.
    """
    found = []
    for text in texts:
        ids = tokens[text.name].ids
        if calibration is not None:
            hashes = calibration.segment_hashes
            count = contained_segments(hashes, calibration.length, ids)
            found.append(CalibrationOverlap(schemes, text.name, count, len(hashes)))
        learned = None if checkpoint is None else checkpoint.calibration
        if checkpoint is not None and learned is not None:
            name, seed = checkpoint.scheme.name, checkpoint.scheme.seed
            count = contained_segments(learned.segment_hashes, learned.length, ids)
            # Of a text with none of them they were not drawn, unless all are the first segment,
            # which may begin with a BOS token that `ids` lack.
            may_be_drawn = count or not learned.segment_hashes or learned.segments == 1
            if may_be_drawn and _is_drawn_from(learned, text, seed, loaded):
                count = learned.segments
            found.append(CalibrationOverlap(name, text.name, count, learned.segments))
    for one in found:
        if one.found >= _REFUSED * one.segments:
            raise AccuracyError(f"{one}: evaluate on another text, or calibrate on another one")
    return [one for one in found if one.found]


def _is_drawn_from(learned: StoredCalibration, text: Text, seed: int, loaded: LoadedModel) -> bool:
    if text.documents:
        return False
    try:
        drawn = calibration_segments(
            tokenize(text, loaded.tokenizer),
            segments=learned.segments,
            length=learned.length,
            seed=seed,
        )
    except QuantizeError:  # too short to have them all
        return False
    return drawn.digest == learned.tokens
