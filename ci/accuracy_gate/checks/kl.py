"""KL divergence of the predictions from the original's, over the tokens of a text."""

from __future__ import annotations

from flexq_bench.accuracy.results import KL, KL_QUANTILES, kl_metric
from flexq_bench.ci.accuracy_gate.contract import ALL_TOKENS
from flexq_bench.ci.accuracy_gate.judging import StatisticsCheck, StatisticsLimit, fewest_tokens
from flexq_bench.workloads.data_files import Amount


class KlLimit(StatisticsLimit):
    """The largest KL divergences from the original's predictions, in nats; None: not limited."""

    mean: Amount | None = None
    median: Amount | None = None
    p95: Amount | None = None
    p99: Amount | None = None
    p999: Amount | None = None
    max: Amount | None = None


class KlCheck(StatisticsCheck[KlLimit]):
    """Each limited statistic of the tokens' KL divergences."""

    key, table = "kl", KlLimit
    metrics = {"mean": KL} | {name: kl_metric(name) for name in KL_QUANTILES}
    form, unit = "KL {}", "nats"

    def fewest(self, statistic: str) -> int:
        share = KL_QUANTILES.get(statistic)
        if share is None:
            return 0
        return fewest_tokens(share) if share < 1 else ALL_TOKENS  # a maximum grows with tokens
