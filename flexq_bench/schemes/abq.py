"""ABQ-LLM: the parameters of OmniQuant, learned with losses on output distribution and attention.

Zeng et al., arXiv 2408.08554: double-log-cosine loss on the block's output and divergence of its
attention map (section 3.2, DLC and AKL), a rank-one compensation of down_proj in the first and the
last block (section 3.2), and for two-bit weights the balanced codes -2 … 2 (section 3.3, `w2*`).
Training is as in OmniQuant (section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexq_bench.schemes.block_training import TrainingOptions
from flexq_bench.schemes.learned_scheme import LearnedOptions, LearnedScheme
from flexq_bench.schemes.scheme import QuantizationState


@dataclass(frozen=True, slots=True)
class AbqOptions(LearnedOptions):
    """compensated_blocks: number of blocks at either end with a rank-one compensation; 0: none."""

    compensated_blocks: int = 1

    def __post_init__(self) -> None:
        LearnedOptions.__post_init__(self)  # a slotted dataclass has no super() without arguments
        if self.compensated_blocks < 0:
            raise ValueError(
                f"compensated are 0 blocks or more at either end, got {self.compensated_blocks}"
            )


class Abq(LearnedScheme):
    """Learned scales, clipping and compensation under DLC and AKL."""

    source = "ABQ-LLM, arXiv:2408.08554, sections 3.2 and 3.3"
    options: AbqOptions

    def training(self) -> TrainingOptions:
        return replace(super().training(), loss="dlc+akl")

    def compensated(self, state: QuantizationState, block: int) -> tuple[str, ...]:
        ends = self.options.compensated_blocks
        if ends <= block < state.layout.blocks - ends:
            return ()
        last = state.layout.sites[-1].role  # down_proj, fc2: the last layer of the feed-forward
        return tuple(site.kind for site in state.layout.of_block(block) if site.role == last)
