"""Measurement of one case on one device, by the protocol."""

from flexq_bench.measure.measured import Measured
from flexq_bench.measure.meter import Meter
from flexq_bench.measure.protocol import PROTOCOL_CPU, PROTOCOL_CUDA, Protocol
from flexq_bench.measure.tuning import Tuning

__all__ = ["PROTOCOL_CPU", "PROTOCOL_CUDA", "Measured", "Meter", "Protocol", "Tuning"]
