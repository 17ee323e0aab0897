"""Errors of quantization; each message is one line.

UsageError
└── QuantizeError    a model, a scheme or calibration data can't be quantized as requested
"""

from __future__ import annotations

from flexq_bench.errors import UsageError


class QuantizeError(UsageError):
    """A model, a scheme or calibration data can't be quantized as requested."""
