"""Ten cases in both regimes: at the clock without power throttling, and under steady load.

    python benchmarks/verdicts/sustained.py --out FOLDER [--cases KEY,KEY]

Needs a GPU. Prints a table of both regimes: time, SM clock, watts, joules per launch and per
tera-operation; and the change of the ratio of FP16 and W6A6 times. Writes sustained.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexq_bench.measure import Meter
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe

SHAPES = ("m1n4096k14336", "m64n4096k14336", "m256n4096k14336", "m1024n4096k14336")
KERNELS = ("cublas-fp16", "flexq")
MORE = (
    "cublaslt-w8a8 gemm cold m1024n4096k14336",
    "cublaslt-fp8 gemm cold m1024n4096k14336",
)
CASES = (*(f"{kernel} gemm cold {shape}" for shape in SHAPES for kernel in KERNELS), *MORE)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def measure(keys: list[str], out: Path) -> None:
    meter = Meter("cuda")
    say(f"{meter.device_info.sku}, limit {meter.device_info.power_limit_w} W")
    say("| case | regime | µs | ± | SM MHz | W | mJ a launch | J a tera-operation | gap µs | s |")
    say("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    times: dict[tuple[str, str], float] = {}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "sustained.jsonl").open("a") as file:
        for case in map(Case.from_key, keys):
            for regime in ("boost", "sustained"):
                row = _measured(meter, replace(case, regime=regime))
                file.write(f"{json.dumps(row)}\n")
                file.flush()
                say(_line(case, row))
                if row["median_us"] is not None:
                    times[case.key, regime] = row["median_us"]
    say("")
    say("| shape | cublas-fp16 / flexq, boost | sustained |")
    say("| --- | ---: | ---: |")
    for shape in SHAPES:
        pairs = [[(f"{k} gemm cold {shape}", r) for k in KERNELS] for r in ("boost", "sustained")]
        if all(key in times for pair in pairs for key in pair):
            ratios = [times[dense] / times[ours] for dense, ours in pairs]
            say(f"| {shape} | {ratios[0]:.3f} | {ratios[1]:.3f} |")


def _measured(meter: Meter, case: Case) -> dict[str, Any]:
    measured = meter.measure(case)
    names = (
        *("status", "detail", "regime", "median_us", "ci_low_us", "ci_high_us", "sm_clock_mhz"),
        *("power_w", "launch_j", "sample_gap_us", "n_samples", "n_invalid", "floor_us"),
        *("placement_medians_us", "extra"),
    )
    values = {name: getattr(measured, name) for name in names}
    return {"case": case.key, "gpu": meter.device_info.sku, **values}


def _line(case: Case, row: dict[str, Any]) -> str:
    if row["median_us"] is None:
        return f"| {case.key} | {row['status']}: {row['detail']} |"
    half = max(row["ci_high_us"] - row["median_us"], row["median_us"] - row["ci_low_us"])
    joules = row["launch_j"]
    energy = "|"
    if joules is not None:
        work = "" if is_probe(case.kernel) else f"{joules / (case.gemm.operations / 1e12):.3g}"
        energy = f"{1e3 * joules:.3g} | {work}"
    return (
        f"| {case.key} | {row['regime']} | {row['median_us']:.2f} | {half / row['median_us']:.2%} "
        f"| {row['sm_clock_mhz'] or 0:.0f} | {row['power_w'] or 0:.0f} | {energy} "
        f"| {row['sample_gap_us']:.0f} | {row['extra']['elapsed_s']:.1f} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    given = parser.parse_args()
    measure(given.cases.split(","), given.out)
