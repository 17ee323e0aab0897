"""One linear layer, Y[M,N] = X[M,K] · W[N,K]^T."""

from __future__ import annotations

from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

OPERATION = Operation(
    name="linear",
    summary="one linear layer, Y[M,N] = X[M,K] · W[N,K]^T",
    parameters=(
        Parameter("m", "tokens", is_axis=True),
        Parameter("n", "output features"),
        Parameter("k", "input features"),
    ),
    inputs=(
        Input("x", ("m", "k"), "activation", "activation"),
        Input("w", ("n", "k"), "weight", "weight"),
    ),
    outputs=(Output("y", ("m", "n"), "fp16"),),
    bytes="weight_bytes(n, k)",
    operations="2 * m * n * k",
    stages=("gemm", "linear"),
)
