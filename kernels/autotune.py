"""Choosing a configuration by timing the candidates, and remembering the choice.

The timer is given: what a time is, and on what buffers, is for whoever measures to say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.contract import Config
from kernels.runtime.files import cache_folder, write_atomically

TimeUs = Callable[[Config], float]
_CLEARLY = 0.01
NEAR = 0.04  # to the fastest: a glance is right to a percent or two


@dataclass(frozen=True, slots=True)
class TuningKey:
    """All that a choice depends on.

    kernel: its label; version: of what the label means. m: the tokens' bucket. gpu: its SKU.
    software: of the sources and libraries that run. favourite: what was preferred, as text.
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


def choose_config(
    candidates: Sequence[Config],
    time_us: TimeUs,
    glance_us: TimeUs | None = None,
    near: float = NEAR,
) -> Config:
    """The fastest candidate. One that raises is passed over.

    time_us: microseconds a launch under a configuration. glance_us: the same, rougher and cheaper:
    with it only those are timed that take at most 1 + near times the fastest one's at a glance.
    Raises ValueError if there is no candidate, and what the last one raised if all do.
    """
    if not candidates:
        raise ValueError("there is no candidate to choose from")
    if glance_us is not None:
        glances = _times(candidates, glance_us)
        most = glances[0][0] * (1 + near)
        candidates = [config for microseconds, config in glances if microseconds <= most]
        if len(candidates) == 1:
            return candidates[0]
    return _times(candidates, time_us)[0][1]


def _times(candidates: Sequence[Config], time_us: TimeUs) -> list[tuple[float, Config]]:
    """Those that don't raise with their times, the fastest first."""
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
    """Times with which the favourite wins unless another configuration is clearly faster.

    favourite: as a dict. Brief times tell percents apart: where two commits are compared, a choice
    between equals must not differ by chance.
    """

    def timed(config: Config) -> float:
        microseconds = time_us(config)
        return microseconds * (1 - _CLEARLY) if config.as_dict() == favourite else microseconds

    return timed


class TuningMemory:
    """Choices already made: in this process, and on disk where it has a folder.

    folder None: forgotten with the process. A choice on disk is a small JSON file, a folder a SKU;
    deleting it forgets the choice. One that is damaged, or no longer a candidate, is made anew.
    fresh: what is on disk or was offered is not read, only written.
    """

    def __init__(self, folder: Path | None = None, *, fresh: bool = False) -> None:
        self._folder, self._fresh = folder, fresh
        self._chosen: dict[TuningKey, Config] = {}
        self._offered: dict[TuningKey, Mapping[str, Any]] = {}

    @property
    def chosen(self) -> Mapping[TuningKey, Config]:
        """The choices of this process, whether made or remembered, in their order."""
        return dict(self._chosen)

    def offer(self, key: TuningKey, config: Mapping[str, Any]) -> None:
        """Know a choice that another process made; it holds where this one knows none itself."""
        self._offered[key] = config

    def choose(
        self,
        key: TuningKey,
        candidates: Sequence[Config],
        time_us: TimeUs,
        glance_us: TimeUs | None = None,
        near: float = NEAR,
    ) -> Config:
        """The remembered choice of `key` if it is a candidate, else choose_config's."""
        known = self._chosen.get(key) or self._read(key, candidates)
        if known is None or known not in candidates:
            known = choose_config(candidates, time_us, glance_us, near)
            self._write(key, known)
        self._chosen[key] = known
        return known

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
    """Return the folder of stored tuning choices, next to that of the compiled kernels."""
    return cache_folder() / "tuning"
