"""Predicted and measured sensitivities of single layers, and their sums over all layers.

    python benchmarks/accuracy/criterion.py --model DIR --data C4 [--segments 4] [--sites 40]

A measured sensitivity is the Kullback-Leibler divergence of the model with the inputs of one layer
rounded to 6 bits from the unquantized model. It is measured for layers that are spread evenly over
the predicted ranking, then with the inputs of all layers rounded. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch
from scipy import stats

from flexq_bench.accuracy.agreement import AgreementMeter, record_reference
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.sensitivity.layer_kinds import restoring
from flexq_bench.accuracy.setup import best_device
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes import Calibration, map_model
from flexq_bench.schemes.layer_sensitivity import SiteSensitivity, activation_sensitivity
from flexq_bench.schemes.uniform import FULL_BITS, round_site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--sites", type=int, default=40)
    parser.add_argument("--length", type=int, default=None, help="tokens of a segment")
    parser.add_argument("--dtype", default=None)
    given = parser.parse_args()

    loaded = load_model(given.model, device=torch.device(best_device()), dtype=given.dtype)
    model, layout = loaded.model, map_model(loaded.model)
    length = loaded.context(given.length)
    tokens = tokenize(read_text(given.data), loaded.tokenizer)[: given.segments * length]
    started = time.monotonic()
    sensitivities = activation_sensitivity(
        model,
        layout,
        Calibration(tokens.view(given.segments, length)),
        low=NumberFormat(6, 128),
        high=NumberFormat(8, 128),
        generator=torch.Generator().manual_seed(0),
    )
    predicting_s = time.monotonic() - started
    reference = record_reference(model, tokens, context=length)

    def measured(rounded: Sequence[SiteSensitivity]) -> float:
        sites = [sensitivity.site for sensitivity in rounded]
        meter = AgreementMeter(reference)
        with restoring(model, sites):
            for site in sites:
                round_site(model, site, FULL_BITS, 6, 128)
            perplexity(model, tokens, context=length, on_logits=meter)
        return meter.result().mean_kl

    ranked = sorted(sensitivities, key=lambda sensitivity: -sensitivity.low)
    step = max(1, len(ranked) // given.sites)
    sample = ranked[::step]
    started = time.monotonic()
    divergences = [measured([sensitivity]) for sensitivity in sample]
    measuring_s = (time.monotonic() - started) * len(ranked) / len(sample)
    expected = [sensitivity.low for sensitivity in sample]
    ratio = sorted(f / e for f, e in zip(divergences, expected, strict=True))
    json.dump(
        {
            "model": loaded.name,
            "tokens": tokens.numel(),
            "sites": len(sample),
            "rank_correlation": float(stats.spearmanr(expected, divergences).statistic),
            "measured_over_predicted": {
                "lower quartile": ratio[len(ratio) // 4],
                "median": ratio[len(ratio) // 2],
                "upper quartile": ratio[3 * len(ratio) // 4],
            },
            "all_predicted": sum(sensitivity.low for sensitivity in sensitivities),
            "all_measured": measured(sensitivities),
            "predicting_s": predicting_s,
            "measuring_all_sites_s": measuring_s,
        },
        sys.stdout,
        indent=2,
    )


if __name__ == "__main__":
    main()
