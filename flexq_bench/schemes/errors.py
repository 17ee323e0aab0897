"""Errors of quantization; each message is one line.

UsageError
└── QuantizeError      a model, a scheme or calibration data can't be quantized as requested
    └── NoKernelError    no kernel computes a layer
"""

from __future__ import annotations

from flexq_bench.errors import UsageError


class QuantizeError(UsageError):
    """A model, a scheme or calibration data can't be quantized as requested."""


class NoKernelError(QuantizeError):
    """No kernel supports the formats of a layer, or none that does can run here."""
