"""Kernels that one commit tends to change together."""

from __future__ import annotations

import re

# What a name ends with and a family shares: the bits of weights and activations, or of one type.
_BITS = re.compile(r"-(w[0-9*]+a[0-9*]+|[a-z]*[0-9]+)$")


def kernel_family(kernel: str) -> str:
    """A kernel's name without its bit widths: `flexq-imma-w6a8` is of the family `flexq-imma`.

    kernel: without variant, as variants are of the same family.
    """
    return _BITS.sub("", kernel)
