"""Planned samples of a text: segments in a random order, and segments that cover its tokens."""

from __future__ import annotations

import hashlib
import heapq

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_STRETCHES = 16  # of a text that is one document: strata of its sample
_MAX_CANDIDATES = 8192  # segments among which covering ones are sought


def sampled_order(documents: Indices, seed: str) -> Indices:
    """Return a random order of a text's segments of which each beginning is a stratified sample.

    documents: [segments], the document of each segment, ascending. seed: any string; the same seed
    and documents give the same order. The segments of a document are spread evenly over the order
    at random places, so that the first k contain about their share of each document (Cochran 1977,
    section 5.9). A text of one document is divided into equal stretches.
    """
    count = documents.size
    if count and documents[0] == documents[-1]:
        documents = np.arange(count) * _STRETCHES // count
    rng = np.random.default_rng(np.frombuffer(hashlib.sha256(seed.encode()).digest(), np.uint32))
    keys = np.empty(count)
    for document in np.unique(documents):
        members = np.flatnonzero(documents == document)
        ranks = rng.permutation(members.size) + rng.random(members.size)
        keys[members] = ranks / members.size
    return np.argsort(keys, kind="stable")


def covering_segments(
    segments: Indices, covered: NDArray[np.bool_], fewest: int, most: int
) -> Indices:
    """Choose segments that contain each token of the vocabulary that occurs, in ascending order.

    segments: [n, tokens], ids. covered: [vocabulary], tokens that need no segment. A token counts
    within a segment, where it is both predicted and predicted from. Greedy set cover (Chvátal
    1979): the segment with the most missing tokens comes next, at most `most`. If fewer than
    `fewest` are needed, those with the rarest tokens are added.
    """
    segments = segments[:_MAX_CANDIDATES]
    inner = [np.unique(segment[1:-1]) for segment in segments]
    missing = ~covered
    queue = [(-int(missing[ids].sum()), index) for index, ids in enumerate(inner)]
    heapq.heapify(queue)
    chosen: list[int] = []
    while queue and len(chosen) < most:
        _, index = heapq.heappop(queue)
        gain = int(missing[inner[index]].sum())  # at most what it was when it was queued
        if gain == 0:
            continue
        if queue and gain < -queue[0][0]:
            heapq.heappush(queue, (-gain, index))
            continue
        missing[inner[index]] = False
        chosen.append(index)
    counts = np.bincount(segments.ravel(), minlength=covered.size)
    rarity = np.array([(1 / counts[ids]).sum() for ids in inner])
    rarest = [int(i) for i in np.argsort(-rarity, kind="stable") if int(i) not in set(chosen)]
    chosen += rarest[: max(0, min(fewest, most) - len(chosen))]
    return np.sort(np.array(chosen, dtype=np.int64))
