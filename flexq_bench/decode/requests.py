"""Requests to serve: lengths of their prompts and responses."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexq_bench.errors import UsageError

# Mean lengths of ShareGPT's conversations in vLLM's paper (arXiv 2309.06180, figure 11). Sigma is
# our choice: the 95th percentile of this lognormal distribution is three times its mean.
_MEAN_PROMPT, _MEAN_NEW = 161.31, 337.99
_SIGMA = 1.0
LOGNORMAL = f"lognormal, means {_MEAN_PROMPT:g} and {_MEAN_NEW:g}, sigma {_SIGMA:g}"


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """Number of tokens of a prompt and of its response, at least 1 each."""

    prompt_tokens: int
    new_tokens: int

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.new_tokens


def drawn_requests(count: int, longest: int, seed: int) -> list[ServingRequest]:
    """Draw lognormal lengths.

    longest: of prompt and response together; each is limited to half of it.
    """
    generator = np.random.default_rng(seed)

    def draw(mean: float) -> list[int]:
        drawn = generator.lognormal(math.log(mean) - _SIGMA**2 / 2, _SIGMA, count)
        rounded = np.clip(np.rint(drawn), 1, longest // 2)
        return [int(length) for length in rounded]

    pairs = zip(draw(_MEAN_PROMPT), draw(_MEAN_NEW), strict=True)
    return [ServingRequest(prompt, new) for prompt, new in pairs]


def read_requests(path: Path) -> list[ServingRequest]:
    """Read lengths, `prompt,new` per line. Raises UsageError with the number of an invalid line."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"can't read {path}: {error}") from error
    requests = []
    for number, row in enumerate(rows, start=1):
        try:
            prompt, new = (int(cell) for cell in row)
        except ValueError:
            prompt = new = 0
        if min(prompt, new) < 1:
            raise UsageError(
                f"{path}:{number}: need two lengths of at least 1, prompt,new, got "
                f"{','.join(row)!r}"
            )
        requests.append(ServingRequest(prompt, new))
    if not requests:
        raise UsageError(f"{path} is empty: write prompt,new a line")
    return requests
