from __future__ import annotations

import copy

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from flexq_bench.accuracy.agreement import AgreementMeter, layer_errors, record_reference
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.schemes.calibration import Calibration
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.smoothing import Folds


def test_predictions_are_compared_token_by_token(a_model, some_tokens):
    model, tokens = a_model(), some_tokens(96)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        expected = model(input_ids=tokens[None, 32:64]).logits[0, :-1].log_softmax(-1)
        got = other(input_ids=tokens[None, 32:64]).logits[0, :-1].log_softmax(-1)
    reference = record_reference(model, tokens, context=32)
    meter = AgreementMeter(reference)
    perplexity(other, tokens, context=32, on_logits=meter)
    agreement = meter.result()
    kl = torch.nn.functional.kl_div(got, expected, reduction="batchmean", log_target=True)
    assert agreement.kl[1] == pytest.approx(kl.item(), rel=1e-4)
    assert agreement.top1[1] == pytest.approx(
        (got.argmax(-1) == expected.argmax(-1)).float().mean().item()
    )
    assert agreement.mean_kl > 0
    assert min(agreement.top1) < 1


def test_model_agrees_with_itself(a_model, some_tokens):
    model, tokens = a_model(), some_tokens(64)
    reference = record_reference(model, tokens, context=32)
    meter = AgreementMeter(reference)
    again = perplexity(model, tokens, context=32, on_logits=meter)
    assert again.nll == reference.result.nll
    assert meter.result().mean_kl == pytest.approx(0, abs=1e-6)
    assert set(meter.result().top1) == {1}


def test_reference_is_unchanged_when_its_model_changes(a_model, some_tokens):
    model, tokens = a_model(), some_tokens(64)
    reference = record_reference(model, tokens, context=32)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    meter = AgreementMeter(reference)
    perplexity(model, tokens, context=32, on_logits=meter)
    assert meter.result().mean_kl > 0.1


SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def a_gemma():
    """A Gemma 2 whose logits are held well within their cap."""
    config = Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=0.5, initializer_range=1.0)
    torch.manual_seed(0)
    return Gemma2ForCausalLM(config).eval()


def mean_kl_from_itself(model, tokens):
    meter = AgreementMeter(record_reference(model, tokens, context=32))
    perplexity(model, tokens, context=32, on_logits=meter)
    return meter.result().mean_kl


@pytest.mark.parametrize("logit_scale", [None, 0.0625, 0.3])
def test_capped_and_scaled_logits_are_compared(a_gemma, some_tokens, logit_scale):
    torch.manual_seed(0)
    config = CohereConfig(**SIZES, logit_scale=logit_scale)
    model = a_gemma if logit_scale is None else CohereForCausalLM(config).eval()
    assert mean_kl_from_itself(model, some_tokens(64)) == pytest.approx(0, abs=1e-6)


def double_logits(_model, _inputs, output):
    output.logits = 2 * output.logits


def test_logits_computed_after_the_head_are_refused(a_gemma, some_tokens):
    a_gemma.register_forward_hook(double_logits)
    with pytest.raises(AccuracyError, match="not what its output head gives"):
        record_reference(a_gemma, some_tokens(64), context=32)


def test_layer_error_is_independent_of_other_layers(a_model, some_tokens):
    model, tokens = a_model(), some_tokens(32)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    errors = layer_errors(model, other, tokens, Folds())
    wrong = {name: error for name, error in errors.items() if error > 1e-12}
    assert wrong == {"model.layers.0.mlp.up_proj": pytest.approx(0.01, rel=1e-4)}
    assert len(errors) == 14


@pytest.mark.parametrize("name", ["smoothquant-w8a8", "awq-w8a16", "dgq-w4a8"])
def test_folded_scales_cause_no_layer_error(a_model, some_tokens, name):
    model, tokens = a_model(), some_tokens(32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.mul_(torch.linspace(0.1, 30, parameter.numel()))
    other = copy.deepcopy(model)
    folds = resolve(name).quantize(other, Calibration(some_tokens(128).view(4, 32)))

    errors = layer_errors(model, other, tokens, folds)

    assert folds.inputs
    assert max(errors.values()) < (0.1 if "w4" in name else 0.01)
