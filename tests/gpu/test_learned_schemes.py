"""Training of learned schemes as a CUDA graph against the same steps launched one by one."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes import graphed_callable, losses, straight_through, training_kernels
from flexq_bench.schemes.block_training import BlockTrainer
from flexq_bench.schemes.calibration import Calibration
from flexq_bench.schemes.registry import resolve

SEGMENTS, EPOCHS = 6, 3


@pytest.fixture
def train(monkeypatch, llama_config):
    """train(name, recorded): what training found for each block, with or without graphs."""

    def trained(name, *, recorded):
        found = []
        learn = BlockTrainer.train
        torch.manual_seed(0)
        own = {"num_attention_heads": 6, "max_position_embeddings": 256}
        config = llama_config(192, 448, 128, **own)
        model = LlamaForCausalLM(config).eval().half().cuda()
        generator = torch.Generator().manual_seed(1)
        calibration = Calibration(torch.randint(0, 128, (SEGMENTS, 256), generator=generator))
        with monkeypatch.context() as patch:
            patch.setattr(
                BlockTrainer, "train", lambda *args: found.append(learn(*args)) or found[-1]
            )
            if not recorded:
                patch.setattr(graphed_callable, "WARMUP_CALLS", SEGMENTS * (EPOCHS + 1) * 2)
            resolve(f"{name}[epochs={EPOCHS}]").quantize(model, calibration)
        return found

    return trained


@pytest.mark.parametrize("name", ["omniquant-w6a6", "omniquant-w4a16", "abq-w4a4", "abq-w2*a8"])
def test_graph_of_the_training_step_equals_single_launches(train, name):
    for ours, theirs in zip(train(name, recorded=True), train(name, recorded=False), strict=True):
        assert ours.losses == theirs.losses
        assert len(set(ours.losses)) == EPOCHS + 1  # it does train
        for table in ("scales", "clips"):
            mine, other = getattr(ours, table), getattr(theirs, table)
            assert mine.keys() == other.keys()
            for key, value in mine.items():
                assert torch.equal(value, other[key]), f"{table} of {key}"
        for key, sides in ours.compensation.items():
            for side, other in zip(sides, theirs.compensation[key], strict=True):
                assert torch.equal(side, other)


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize(("rows", "k"), [(1, 64), (7, 70), (2048, 576), (64, 1536), (5, 8192)])
@pytest.mark.parametrize(
    "number",
    [
        NumberFormat(6),
        NumberFormat(4, 32),
        NumberFormat(6, 128, clip=0.9),
        NumberFormat(3, None, "balanced"),
    ],
    ids=lambda number: number.name,
)
def test_fused_rounding_and_gradient_equal_their_definition(number, rows, k, clipped):
    generator = torch.Generator().manual_seed(rows + k)
    x = torch.randn(rows, k, generator=generator)
    x[0] = 0  # no scale
    x[-1, :3] = x[-1].abs().max() + 1  # several with the largest magnitude
    x[-1, 1] *= -1
    groups = 1 if number.group is None else -(-k // number.group)
    shares = torch.rand(rows, groups, generator=generator) + 0.2 if clipped else None
    weight = torch.randn(rows, k, generator=generator)
    assert training_kernels.kernels_for(x.cuda()) is not None
    found = []
    for device in ("cuda", "cpu"):
        leaves = [x.to(device).requires_grad_()]
        leaves += [] if shares is None else [shares.to(device).requires_grad_()]
        rounded = straight_through.fake_quantize(leaves[0], number, *leaves[1:])
        (rounded * weight.to(device)).sum().backward()
        found.append([rounded.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    assert torch.equal(found[0][0], found[1][0])
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        # A share's gradient is a sum of terms near 1 that may cancel to a millionth of them.
        bound = 1e-4 * float(theirs.abs().max()) + 1e-6
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=bound)


def test_fused_attention_loss_and_gradient_equal_their_definition(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(1, 3, 65, 65, generator=generator).cuda() for _ in range(2))
    future = torch.ones(65, 65, device="cuda").triu(1).bool()
    theirs = theirs.masked_fill(future, -torch.inf).softmax(-1)
    found = []
    for kernels in (training_kernels.kernels_for, lambda tensor: None):
        monkeypatch.setattr(losses, "kernels_for", kernels)
        leaf = ours.clone().requires_grad_()
        loss = losses.attention_divergence(leaf.masked_fill(future, -torch.inf).softmax(-1), theirs)
        (3 * loss).backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)


def test_graphs_are_recorded_once_a_block(train, monkeypatch):
    recorded = []
    monkeypatch.setattr(
        torch.cuda, "CUDAGraph", lambda made=torch.cuda.CUDAGraph: recorded.append(1) or made()
    )
    train("abq-w4a4", recorded=True)
    assert len(recorded) == 2 * 3  # targets, the loss before training, the training step
