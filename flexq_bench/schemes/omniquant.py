"""OmniQuant: weight clipping and channel scales learned block by block, by the outputs' error.

Shao et al., arXiv 2308.13137: learnable weight clipping (section 3.2), learnable equivalent
transformation (section 3.3), mean squared error of each block's output (section 3.1), 20 epochs of
AdamW over 128 segments of 2048 tokens, 0.005 and 0.01 as learning rates (section 4.1). By default
codes are signed, as kernels require, so a range has one bound instead of the paper's two; with
`symmetric=false` they have zero points and two bounds.
"""

from __future__ import annotations

from flexq_bench.schemes.learned_scheme import LearnedScheme


class OmniQuant(LearnedScheme):
    """Learned scales and clipping under the mean squared error."""

    source = "OmniQuant, arXiv:2308.13137, section 3"
