"""Tokens that are drawn follow the tempered, cut distribution; given seeds, always the same."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from flexq_bench.serving.generation import Sampler, Sampling
from flexq_bench.serving.sampling import choose, score

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0]).half()
DRAWS = 4000


def drawn(sampling: Sampling) -> torch.Tensor:
    """How often each token is drawn."""
    samplers = [Sampler(sampling, sequence) for sequence in range(DRAWS)]
    tokens = [chosen.token for chosen in choose(LOGITS.expand(DRAWS, -1), samplers)]
    return torch.tensor(tokens).bincount(minlength=len(LOGITS))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature):
    counts = drawn(Sampling(temperature, seed=1))

    expected = torch.softmax(LOGITS[:5].double() / temperature, dim=0) * DRAWS
    assert counts[5] == 0
    assert chisquare(counts[:5].numpy(), expected.numpy(), sum_check=False).pvalue > 1e-3


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_p=0.5, seed=1), 1),  # the likeliest has 0.55
        (Sampling(top_p=0.6, seed=1), 2),
        (Sampling(top_p=1e-9, seed=1), 1),
        (Sampling(top_k=3, seed=1), 3),
        (Sampling(top_p=0.6, top_k=1, seed=1), 1),
    ],
)
def test_top_p_and_top_k_keep_the_likeliest(sampling, kept):
    counts = drawn(sampling)

    assert (counts > 0).tolist() == [rank < kept for rank in range(6)]
    shares = torch.softmax(LOGITS[:kept].double(), dim=0)
    errors = (shares * (1 - shares) * DRAWS).sqrt()
    assert ((counts[:kept] - shares * DRAWS).abs() <= 4 * errors).all()


def test_greedy_takes_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]]).half()

    assert choose(logits, [Sampler(Sampling(0.0, logprobs=1))])[0].token == 1


def test_choice_does_not_depend_on_other_rows():
    one, other = Sampling(1.5, seed=3, logprobs=2), Sampling(0.7, top_p=0.4, seed=4)
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).half()

    together = choose(rows, [Sampler(one), Sampler(other), Sampler(one)])

    assert together[2] == choose(rows[2:], [Sampler(one)])[0]
    assert together[1].logprob is None


def test_scores_are_log_probabilities_of_given_tokens():
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).half()

    scored = score(rows, [1, 8, 0, 3], 2)

    expected = torch.log_softmax(rows.float(), dim=1)
    assert [chosen.logprob for chosen in scored] == pytest.approx(
        [float(expected[i, token]) for i, token in enumerate([1, 8, 0, 3])]
    )
    assert scored[2].top[0][0] == int(rows[2].argmax())
    assert len(scored[2].top) == 2


def test_logits_that_are_no_numbers_give_a_token():
    logits = torch.full((1, 7), torch.nan).half()

    assert 0 <= choose(logits, [Sampler(Sampling(1.0, seed=0))])[0].token < 7
    assert 0 <= choose(logits, [Sampler(Sampling(1.0, top_p=0.5, seed=0))])[0].token < 7
