"""Language models built from their configuration on torch's meta device, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexq_bench.errors import UsageError, one_line

if TYPE_CHECKING:
    import torch

# transformers' automatic classes of language models -> their tables; some versions lack some.
_TABLES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "AutoModelForVision2Seq": "MODEL_FOR_VISION_2_SEQ_MAPPING",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "AutoModelForTextEncoding": "MODEL_FOR_TEXT_ENCODING_MAPPING",
}
_BASE = "AutoModel"


def build_model(values: Mapping[str, Any], file: Path) -> tuple[torch.nn.Module, int]:
    """Build a language model; returns it and its hidden size, 0 if its parts have their own.

    values: a configuration of a type that transformers knows. Of a multimodal model, only
    the text decoder is built if transformers has a class for it. Raises UsageError.
    """
    import torch
    import transformers

    from flexq_bench.checkpoints.model_source import quiet_transformers

    version = f"transformers {transformers.__version__}"
    try:
        with quiet_transformers(), torch.device("meta"):
            config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))
            auto, config = _class_and_config(config, values)
            model = getattr(transformers, auto).from_config(
                config, attn_implementation="eager", trust_remote_code=False
            )
            return model, int(getattr(config, "hidden_size", None) or 0)
    except Exception as error:  # model code raises any exception for impossible sizes
        raise UsageError(
            f"{version} builds no language model of {file} ({one_line(error):.160}): mend it, or "
            "name another"
        ) from error


def _class_and_config(config: Any, values: Mapping[str, Any]) -> tuple[str, Any]:
    """Name of the automatic class, and configuration to build. Raises ValueError without any."""
    import transformers

    text = config.get_text_config(decoder=True)
    if text is not config and _describes_text(values, text):
        text = type(text).from_dict({k: v for k, v in values.items() if k != "model_type"})
    _complete(config)
    _complete(text)
    for auto in ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"):
        if config.is_encoder_decoder and _has_class(auto, config):
            return auto, config
    if _has_class("AutoModelForCausalLM", text):
        return "AutoModelForCausalLM", text
    for part in _parts(config, text):
        for auto in _TABLES:
            if _has_class(auto, part):
                return (_BASE, text) if _has_class(_BASE, text) else (auto, part)
    if text is config and hasattr(config, "vocab_size") and _has_class(_BASE, config):
        base = transformers.MODEL_MAPPING[type(config)]
        if getattr(base, "main_input_name", "") == "input_ids":  # a part of such a model
            return _BASE, config
    raise ValueError(f"{config.model_type} is no language model")


def _parts(config: Any, text: Any) -> list[Any]:
    """A configuration and its sections around this decoder of text, the smallest first."""
    sections = (getattr(config, name, None) for name in config.sub_configs)
    around = (s for s in sections if s is not None and s is not text)
    return [*(s for s in around if s.get_text_config(decoder=True) is text), config]


def _has_class(auto: str, config: Any) -> bool:
    import transformers

    table = getattr(transformers, _TABLES.get(auto, "MODEL_MAPPING"), {})
    try:
        return table[type(config)] is not None
    except (KeyError, ValueError):  # not in the table, or in it without a class
        return False


def _describes_text(values: Mapping[str, Any], text: Any) -> bool:
    """True if the sizes of the decoder are beside those of the other parts, without a section."""
    hidden = values.get("hidden_size")
    if hidden is None or hidden == getattr(text, "hidden_size", None):
        return False
    return not any(
        isinstance(section, dict) and section.get("hidden_size") == getattr(text, "hidden_size", 0)
        for section in values.values()
    )


def _complete(config: Any) -> None:
    """Replace values without effect on sizes, or null with one meaning, that classes refuse."""
    sizes = vars(config)  # keys that differ between layers are elsewhere
    padding, words = sizes.get("pad_token_id"), sizes.get("vocab_size")
    if isinstance(padding, int) and isinstance(words, int) and padding >= words:
        config.pad_token_id = None
    heads, hidden = sizes.get("num_attention_heads"), sizes.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int) or not heads:
        return
    if sizes.get("head_dim", heads) is None:
        config.head_dim = hidden // heads
    if sizes.get("num_key_value_heads", heads) is None:
        config.num_key_value_heads = heads
