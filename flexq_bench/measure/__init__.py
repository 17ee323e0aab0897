"""Measurement of one case on one device, by the protocol.

Exported names are imported on first use, so that servers of processes (`measure.judged_places`)
start before this process imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexq_bench.measure.measured import Measured
    from flexq_bench.measure.meter import Meter
    from flexq_bench.measure.protocol import PROTOCOL_CPU, PROTOCOL_CUDA, Protocol
    from flexq_bench.measure.tuning import Tuning

__all__ = ["PROTOCOL_CPU", "PROTOCOL_CUDA", "Measured", "Meter", "Protocol", "Tuning"]

_MODULES = {
    "PROTOCOL_CPU": "protocol",
    "PROTOCOL_CUDA": "protocol",
    "Measured": "measured",
    "Meter": "meter",
    "Protocol": "protocol",
    "Tuning": "tuning",
}


def __getattr__(name: str) -> Any:
    """Import an exported name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
