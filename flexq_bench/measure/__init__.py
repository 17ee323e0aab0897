"""Measurement of one case on one device, by the protocol.

Exported names are imported on first use, so that servers of processes (`measure.judged_places`)
start before this process imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexq_bench.packages import exported_on_use

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


__getattr__ = exported_on_use(__name__, _MODULES)
