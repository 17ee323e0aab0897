"""Time of a training step of a learned scheme, with and without a CUDA graph.

    python benchmarks/accuracy/training_step.py --model DIR --calibration C4 [--segments 32]

One block is trained for one epoch and for three; the difference gives the time of a step, without
loading, targets and recording. Prints a JSON line for each scheme.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from output import say_row

from flexq_bench.accuracy.loading import LoadedModel, load_model
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.schemes import Calibration, calibration_segments, graphed_callable, resolve

NEVER = 10**9  # calls


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--segments", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--schemes", nargs="*", default=["omniquant-w6a6", "abq-w6a6"])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(arguments.model, device=device)
    loaded.model.model.layers = loaded.model.model.layers[:1]
    loaded.model.config.num_hidden_layers = 1
    tokens = tokenize(read_text(arguments.calibration), loaded.tokenizer)
    data = calibration_segments(tokens, segments=arguments.segments, length=arguments.length)
    for name in arguments.schemes:
        seconds(loaded, name, 1, data)  # libraries load, kernels are compiled
        row = {"scheme": name, "segments": data.segments, "length": data.length}
        usual = graphed_callable.WARMUP_CALLS
        for kind, calls in (("graph", usual), ("launches", NEVER)):
            graphed_callable.WARMUP_CALLS = calls
            one_s, three_s = (seconds(loaded, name, epochs, data) for epochs in (1, 3))
            row[f"{kind}_ms"] = round(1000 * (three_s - one_s) / (2 * data.segments), 3)
        graphed_callable.WARMUP_CALLS = usual
        say_row(row)


def seconds(loaded: LoadedModel, name: str, epochs: int, data: Calibration) -> float:
    """Measure the time to quantize the block with this number of epochs, in seconds."""
    model = copy.deepcopy(loaded.model)
    started = time.monotonic()
    resolve(f"{name}[epochs={epochs}]").quantize(model, data)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


if __name__ == "__main__":
    main()
