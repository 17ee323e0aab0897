"""Calibration segments that are part of an evaluated text.

A scheme that was calibrated on the evaluated text loses less accuracy there than elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexq_bench.accuracy.bos import TextTokens
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.texts import Text, tokenize
from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.config import StoredCalibration
from flexq_bench.schemes.calibration import Calibration, calibration_segments, contained_segments
from flexq_bench.schemes.errors import QuantizeError

_MIN_REFUSED_SHARE = 0.5  # share of the segments; fewer may be passages that both texts contain


@dataclass(frozen=True, slots=True)
class CalibrationOverlap:
    """Calibration segments in a text. found: number of them, of `segments`. text: its name."""

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
    """Return the texts that contain calibration segments. tokens: of each text, by name.

    schemes: names of those that use `calibration`; None: none does. If a checkpoint doesn't store
    the hashes of its segments, the hash of all of them is compared, which only detects the text
    that they were drawn from. Raises AccuracyError if a text contains half of the segments.
    """
    overlaps = []
    for text in texts:
        if text.parts:  # segments of texts that are compared themselves
            continue
        ids = tokens[text.name].in_order
        if calibration is not None:
            hashes = calibration.segment_hashes
            count = contained_segments(hashes, calibration.length, ids)
            overlaps.append(CalibrationOverlap(schemes, text.name, count, len(hashes)))
        learned = None if checkpoint is None else checkpoint.calibration
        if checkpoint is not None and learned is not None:
            name, seed = checkpoint.scheme.name, checkpoint.scheme.seed
            count = contained_segments(learned.segment_hashes, learned.length, ids)
            # A text without any of them is not their source. A single segment is an exception: it
            # may begin with a BOS token that is not in `ids`.
            may_be_drawn = count or not learned.segment_hashes or learned.segments == 1
            if may_be_drawn and _is_drawn_from(learned, text, seed, loaded):
                count = learned.segments
            overlaps.append(CalibrationOverlap(name, text.name, count, learned.segments))
    for overlap in overlaps:
        if overlap.found >= _MIN_REFUSED_SHARE * overlap.segments:
            raise AccuracyError(f"{overlap}: evaluate on another text, or calibrate on another one")
    return [overlap for overlap in overlaps if overlap.found]


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
    except QuantizeError:  # too short to contain all of them
        return False
    return drawn.digest == learned.tokens
