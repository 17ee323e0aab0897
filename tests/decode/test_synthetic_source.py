"""Random weights of a catalog model in a checkpoint are those that decode draws."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.decode.architecture import of_catalog
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.decode.synthetic_source import SyntheticSource
from flexq_bench.decode.weights import SyntheticWeights
from flexq_bench.schemes.registry import resolve
from flexq_bench.workloads.model_spec import ModelSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("block", ["llama", "qwen2", "qwen3", "opt"])
def test_synthetic_checkpoint_equals_rounded_synthetic_weights(block, tmp_path):
    is_opt = block == "opt"
    spec = ModelSpec(
        name=f"small-{block}",
        family="small",
        block=block,
        hidden=64,
        ffn=160,
        layers=2,
        heads=4,
        kv_heads=4 if is_opt else 2,
        vocab=40,
        context=32,
        tied_embeddings=is_opt,
        learned_positions=is_opt,
        source="a test",
    )
    weights, scheme = SyntheticWeights(of_catalog(spec), seed=3), resolve("w6a6")

    quantize_checkpoint(
        SyntheticSource(weights), scheme, tmp_path / "out", device=CPU, dtype=torch.float16
    )

    stored = CheckpointWeights(open_checkpoint(tmp_path / "out"))
    rounded = RoundedWeights(weights, scheme)
    assert stored.is_synthetic
    for index in range(spec.layers):
        ours, theirs = stored.block(index, CPU), rounded.block(index, CPU)
        for name, layer in theirs.linears.items():
            assert torch.equal(ours.linears[name].weight.values, layer.weight.values)
            assert torch.equal(ours.linears[name].weight.scales, layer.weight.scales)
            if layer.bias is not None:
                assert torch.equal(ours.linears[name].bias, layer.bias)
        assert torch.equal(ours.attention_norm.weight, theirs.attention_norm.weight)
    ours, theirs = stored.ends(CPU), rounded.ends(CPU)
    assert torch.equal(ours.embedding, theirs.embedding)
    assert torch.equal(ours.head, theirs.head)
    if is_opt:
        assert torch.equal(ours.positions, theirs.positions)
