"""Choice of a kernel's configuration by timing its candidates, and a cache of the choices.

`TuningMemory.choose` is called for each measured case (flexq_bench/measure/prepared.py) and each
layer of a decoded model (flexq_bench/decode/tuning.py), with the kernel's `candidates` and a
function that times them (flexq_bench/measure/tuning.py). Without tuning (`--no-tune`, `gemm` with
config None), the kernel's own `default_config` chooses: see kernels/cuda/timed_choice.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.runtime.files import cache_folder, write_atomically

TimeUs = Callable[[Config], float]
_MIN_ADVANTAGE = 0.01  # relative, over the favourite
NEAR = 0.04  # relative to the fastest coarse time; coarse times are right to a percent or two


@dataclass(frozen=True, slots=True)
class TuningKey:
    """Key of a tuning result: everything that the choice depends on.

    kernel, version: label and version of its spec. m: the bucket of tokens. gpu: its SKU.
    software: hash of the sources and libraries that run. favourite: the preferred configuration,
    as text.
    """

    kernel: str
    version: int
    m: int
    n: int
    k: int
    stage: str
    cache: str
    gpu: str
    software: str
    favourite: str = ""

    @property
    def hash(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def choose_fastest(
    candidates: Sequence[Config],
    time_us: TimeUs,
    coarse_us: TimeUs | None = None,
    near: float = NEAR,
) -> Config:
    """Return the fastest candidate. Candidates that raise are skipped.

    time_us: microseconds per launch of a configuration. coarse_us: a cheaper, less accurate time;
    if given, only candidates within 1 + near times the fastest coarse time are timed by time_us.
    Raises ValueError if there is no candidate, and the last candidate's error if all raise.
    """
    if not candidates:
        raise ValueError("there is no candidate to choose from")
    if coarse_us is not None:
        coarse = _times(candidates, coarse_us)
        limit = coarse[0][0] * (1 + near)
        candidates = [config for microseconds, config in coarse if microseconds <= limit]
        if len(candidates) == 1:
            return candidates[0]
    return _times(candidates, time_us)[0][1]


def _times(candidates: Sequence[Config], time_us: TimeUs) -> list[tuple[float, Config]]:
    """Time the candidates, fastest first; those that raise are left out."""
    timed: list[tuple[float, Config]] = []
    last_error: Exception | None = None
    for config in candidates:
        try:
            timed.append((time_us(config), config))
        except Exception as error:
            last_error = error
    if not timed:
        assert last_error is not None  # every candidate raised
        raise last_error
    return sorted(timed, key=lambda pair: pair[0])


def preferring(time_us: TimeUs, favourite: Mapping[str, Any] | None) -> TimeUs:
    """Wrap time_us so that the favourite wins unless another configuration is 1 % faster.

    favourite: a configuration as a dict. Where two commits are compared, noise must not make them
    choose different configurations of equal speed.
    """

    def timed(config: Config) -> float:
        microseconds = time_us(config)
        return (
            microseconds * (1 - _MIN_ADVANTAGE) if config.as_dict() == favourite else microseconds
        )

    return timed


class TuningMemory:
    """Cache of tuning results: in this process, and on disk if it has a folder.

    folder None: in this process only. On disk a choice is a small JSON file in a folder per SKU,
    which may be deleted. A damaged file, or a choice that is no longer a candidate, is replaced.
    fresh: choices on disk and offered ones are not read, only written.
    """

    def __init__(self, folder: Path | None = None, *, fresh: bool = False) -> None:
        self._folder, self._fresh = folder, fresh
        self._chosen: dict[TuningKey, Config] = {}
        self._offered: dict[TuningKey, Mapping[str, Any]] = {}

    @property
    def chosen(self) -> Mapping[TuningKey, Config]:
        """Return all choices that this process made or read, in order."""
        return dict(self._chosen)

    def offer(self, key: TuningKey, config: Mapping[str, Any]) -> None:
        """Add a choice of another process, used if this process and the disk have none."""
        self._offered[key] = config

    def choose(
        self,
        key: TuningKey,
        candidates: Sequence[Config],
        time_us: TimeUs,
        coarse_us: TimeUs | None = None,
        near: float = NEAR,
    ) -> Config:
        """Return the cached choice of `key` if it is a candidate, else choose_fastest's."""
        known = self.recall(key, candidates)
        if known is None:
            known = choose_fastest(candidates, time_us, coarse_us, near)
            self._write(key, known)
        self._chosen[key] = known
        return known

    def recall(self, key: TuningKey, candidates: Sequence[Config]) -> Config | None:
        """Return the cached choice of `key`; None: there is none, or it is no candidate."""
        known = self._chosen.get(key) or self._read(key, candidates)
        return known if known in candidates else None

    def _path(self, key: TuningKey) -> Path | None:
        if self._folder is None:
            return None
        sku = "".join(c if c.isalnum() else "-" for c in key.gpu)
        return self._folder / sku / f"{key.hash}.json"

    def _read(self, key: TuningKey, candidates: Sequence[Config]) -> Config | None:
        if self._fresh:
            return None
        path, chosen = self._path(key), self._offered.get(key)
        if path is not None and path.is_file():
            with suppress(OSError, ValueError, KeyError, TypeError):
                chosen = json.loads(path.read_text())["config"]
        return next((config for config in candidates if config.as_dict() == chosen), None)

    def _write(self, key: TuningKey, config: Config) -> None:
        path = self._path(key)
        if path is not None:
            content = {"key": asdict(key), "config": config.as_dict()}
            write_atomically(path, json.dumps(content, indent=1).encode())


def tuning_folder() -> Path:
    """Return the folder of tuning results, next to that of compiled kernels."""
    return cache_folder() / "tuning"
