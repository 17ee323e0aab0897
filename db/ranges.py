"""Valid ranges of the numbers in a record.

Histories are computed from these numbers, so impossible values are rejected. The bounds are wide:
they exclude what is impossible, not what is unusual.
"""

from __future__ import annotations

from collections.abc import Iterable

from flexq_bench.db.errors import RecordError

_DAYS_US = 1e12  # 11.6 days, longer than any run
_COUNT = 2**40
_BYTES = 2**60
_VERSION = 2**31 - 1
_SIZE = 2**31 - 1

# lower and upper bound, inclusive, and names of fields
_FIELDS: tuple[tuple[float, float, str], ...] = (
    # the case and its versions
    (0, _VERSION, "kernel_version protocol_version scheme_version policy_version"),
    (1, _SIZE, "m n k"),
    (0, 64, "weight_bits act_bits"),
    (1, 64, "kv_bits"),
    (1, 2**24, "group"),
    (0, 255, "exit_code"),
    # times; negative only for metrics other than time
    (-_DAYS_US, _DAYS_US, "median_us ci_low_us ci_high_us"),
    (
        0,
        _DAYS_US,
        "floor_us launch_us sample_gap_us placement_medians_us samples_us prefill_ms step_ms "
        "token_ms token_ci_low_ms token_ci_high_ms token_p50_ms token_p95_ms ttft_p50_ms "
        "ttft_p95_ms process_medians_ms latency_p50_s latency_p95_s latency_p99_s",
    ),
    # derived from times
    (0, 1e9, "pct_of_floor tops launch_j"),
    (0, 1e12, "tokens_per_s energy_j energy_j_per_token"),
    (0, 1e300, "max_rel_error standard_error"),
    # counts
    (
        0,
        _COUNT,
        "n_samples n_invalid n_items topo_order number prompt_tokens new_tokens sm_count",
    ),
    (1, _COUNT, "batch batch_limit requests"),
    # the device
    (0, 1e6, "sm_clock_mhz mem_clock_mhz power_w power_limit_w"),
    (-273.15, 1e6, "temperature_c"),
    (0, 2**63 - 1, "seed throttle_mask"),
    (
        0,
        _BYTES,
        "memory_bytes l2_bytes weights_bytes steady_memory_bytes peak_memory_bytes "
        "memory_limit_bytes",
    ),
)
_RANGES = {name: (low, high) for low, high, names in _FIELDS for name in names.split()}


_ANY_NUMBER = (-(2.0**63), 2.0**62)  # of any field; larger ones are checked by their type


def range_of(name: str) -> tuple[float, float]:
    """Return a range of numbers that a field of this name may have: of usual ones, if of any."""
    return _RANGES.get(name, _ANY_NUMBER)


def check_number(name: str, value: float) -> None:
    """Raise RecordError if a field of this name can't have this value."""
    bounds = _RANGES.get(name)
    if bounds is not None and not bounds[0] <= value <= bounds[1]:
        raise RecordError(f"{name} is {value}, out of range: it is from {_range(bounds)}")


def check_numbers(name: str, values: Iterable[float]) -> None:
    """Call check_number for each value."""
    bounds = _RANGES.get(name)
    if bounds is None:
        return
    low, high = bounds
    for value in values:
        if not low <= value <= high:
            check_number(name, value)


def _range(bounds: tuple[float, float]) -> str:
    return " to ".join(f"{bound:.6g}" for bound in bounds)
