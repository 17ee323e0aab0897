"""`flexq-bench gate`: its verbs."""

from __future__ import annotations

import typer

from flexq_bench.cli.verbs import Verb, verb_group

_VERBS = {
    "static": Verb(
        "gate_static",
        "static",
        "Compile the kernels of two revisions and compare their machine code, without a GPU.",
    ),
    "perf": Verb(
        "gate_perf",
        "perf",
        "Compare two revisions, interleaved on one device, and check every case against a policy.",
    ),
    "accuracy": Verb(
        "gate_accuracy",
        "accuracy",
        "Evaluate a model as it is and quantized, and check its accuracy loss against a policy.",
    ),
    "served": Verb(
        "gate_served",
        "served",
        "Ask two engines the same questions, and judge head by a policy with stated power.",
    ),
}
app = typer.Typer(
    cls=verb_group(_VERBS),
    no_args_is_help=True,
    help="Decide by rules whether a change may be merged.",
)


@app.callback()
def gate() -> None:
    """Decide by rules whether a change may be merged."""
