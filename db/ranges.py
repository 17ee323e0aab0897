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

_RANGES: dict[str, tuple[float, float]] = {
    # the case and its versions
    "kernel_version": (0, _VERSION),
    "protocol_version": (0, _VERSION),
    "scheme_version": (0, _VERSION),
    "policy_version": (0, _VERSION),
    "m": (1, _SIZE),
    "n": (1, _SIZE),
    "k": (1, _SIZE),
    "weight_bits": (0, 64),
    "act_bits": (0, 64),
    "kv_bits": (1, 64),
    "group": (1, 2**24),
    "seed": (0, 2**63 - 1),
    "exit_code": (0, 255),
    # times
    "median_us": (-_DAYS_US, _DAYS_US),  # negative only for metrics other than time
    "ci_low_us": (-_DAYS_US, _DAYS_US),
    "ci_high_us": (-_DAYS_US, _DAYS_US),
    "floor_us": (0, _DAYS_US),
    "launch_us": (0, _DAYS_US),
    "sample_gap_us": (0, _DAYS_US),
    "placement_medians_us": (0, _DAYS_US),
    "samples_us": (0, _DAYS_US),
    "prefill_ms": (0, _DAYS_US),
    "step_ms": (0, _DAYS_US),
    "token_ms": (0, _DAYS_US),
    "token_ci_low_ms": (0, _DAYS_US),
    "token_ci_high_ms": (0, _DAYS_US),
    "token_p50_ms": (0, _DAYS_US),
    "token_p95_ms": (0, _DAYS_US),
    "ttft_p50_ms": (0, _DAYS_US),
    "ttft_p95_ms": (0, _DAYS_US),
    "process_medians_ms": (0, _DAYS_US),
    "latency_p50_s": (0, _DAYS_US),
    "latency_p95_s": (0, _DAYS_US),
    "latency_p99_s": (0, _DAYS_US),
    # derived from times
    "pct_of_floor": (0, 1e9),
    "tops": (0, 1e9),
    "tokens_per_s": (0, 1e12),
    "max_rel_error": (0, 1e300),
    "standard_error": (0, 1e300),
    "launch_j": (0, 1e9),
    "energy_j": (0, 1e12),
    "energy_j_per_token": (0, 1e12),
    # counts
    "n_samples": (0, _COUNT),
    "n_invalid": (0, _COUNT),
    "n_items": (0, _COUNT),
    "topo_order": (0, _COUNT),
    "number": (0, _COUNT),
    "batch": (1, _COUNT),
    "batch_limit": (1, _COUNT),
    "requests": (1, _COUNT),
    "prompt_tokens": (0, _COUNT),
    "new_tokens": (0, _COUNT),
    # the device
    "sm_clock_mhz": (0, 1e6),
    "mem_clock_mhz": (0, 1e6),
    "power_w": (0, 1e6),
    "power_limit_w": (0, 1e6),
    "temperature_c": (-273.15, 1e6),
    "throttle_mask": (0, 2**63 - 1),
    "sm_count": (0, _COUNT),
    "memory_bytes": (0, _BYTES),
    "l2_bytes": (0, _BYTES),
    "weights_bytes": (0, _BYTES),
    "steady_memory_bytes": (0, _BYTES),
    "peak_memory_bytes": (0, _BYTES),
    "memory_limit_bytes": (0, _BYTES),
}


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
