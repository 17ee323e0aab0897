"""The loss of each block before and after a learned scheme trains it.

    python benchmarks/accuracy/block_losses.py --model DIR --calibration C4 --schemes NAME ...
        [--segments 16] [--length 2048]

The loss of a block before training includes the errors of its inputs, so it is high if earlier
blocks lost accuracy. Prints a JSON line for each block with its losses by epoch.
"""

from __future__ import annotations

import argparse
import copy

import torch
from output import say_row
from torch import nn

from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.schemes import QuantizationState, calibration_segments, resolve
from flexq_bench.schemes.block_training import Learned
from flexq_bench.schemes.learned_scheme import LearnedScheme


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--schemes", nargs="+", required=True)
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(arguments.model, device=device)
    tokens = tokenize(read_text(arguments.calibration), loaded.tokenizer)
    data = calibration_segments(tokens, segments=arguments.segments, length=arguments.length)
    train = LearnedScheme.train_block

    def train_and_report(
        self: LearnedScheme, state: QuantizationState, block: int, module: nn.Module
    ) -> Learned:
        learned = train(self, state, block, module)
        row = {"scheme": self.name, "segments": data.segments, "block": block}
        losses = [round(loss, 5) for loss in learned.losses]
        say_row(row | {"losses": losses})
        return learned

    LearnedScheme.train_block = train_and_report  # type: ignore[method-assign]
    for name in arguments.schemes:
        resolve(name).quantize(copy.deepcopy(loaded.model), data)


if __name__ == "__main__":
    main()
