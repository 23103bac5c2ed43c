"""Loading any Hugging Face causal LM, with a vocabulary or a scalar head; what is wrong with a folder is said on one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from jackfield.config import ModelConfig
from jackfield.errors import DataError

_TROUBLE = (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, SafetensorError)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """What transformers raises over a bad folder, as a DataError of one line."""
    try:
        yield
    except _TROUBLE as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        cause = lines[0].strip() if lines else type(error).__name__
        raise DataError(
            f"model {path}: cannot be loaded ({type(error).__name__}: {cause[:300]}); "
            "give a complete Hugging Face folder (config.json, *.safetensors, tokenizer) or a hub name"
        ) from error


def check_folder(config: ModelConfig) -> None:
    """Raise DataError where `path` is meant as a folder and does not hold a model."""
    folder = Path(config.path)
    local = folder.is_absolute() or config.path.startswith((".", "~")) or config.path.count("/") > 1
    if not folder.exists():
        if local:
            raise DataError(f"model {config.path}: no such folder; give a Hugging Face folder or a hub name (owner/name)")
        return
    if not (folder / "config.json").is_file():
        raise DataError(f"model {config.path}: no config.json in it; give a Hugging Face folder or a hub name (owner/name)")
    for index in folder.glob("*.safetensors.index.json"):
        wanted = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in wanted if not (folder / name).is_file())
        if missing and config.init == "pretrained":
            raise DataError(f"model {config.path}: {len(missing)} of {len(wanted)} weight files are missing, first {missing[0]}")


def load_model(config: ModelConfig, *, seed: int) -> Any:
    """The model on the CPU, in its files' type. Random weights are drawn in float32 under `seed`: the same for every backend.

    With `head="value"` it is a sequence-classification model of one output whose `score` is 0, unless the folder holds a trained one.
    Raises DataError.
    """
    check_folder(config)
    with _readable(config.path):
        settings = transformers.AutoConfig.from_pretrained(config.path)
        if config.head == "value":
            settings.num_labels = 1
            settings.pad_token_id = settings.pad_token_id or 0
        return _random(settings, config.head, seed) if config.init == "random" else _pretrained(config, settings)


def _random(settings: Any, head: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        if head == "lm":
            return model
        value = transformers.AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
    setattr(value, value.base_model_prefix, model.base_model)
    nn.init.zeros_(value.score.weight)
    return value


def _pretrained(config: ModelConfig, settings: Any) -> Any:
    auto = transformers.AutoModelForCausalLM if config.head == "lm" else transformers.AutoModelForSequenceClassification
    with _quiet():
        model, info = auto.from_pretrained(config.path, config=settings, dtype="auto", output_loading_info=True)
    missing = set(info["missing_keys"])
    if config.head == "value" and any(name.startswith("score.") for name in missing):
        nn.init.zeros_(model.score.weight)
        missing -= {name for name in missing if name.startswith("score.")}
    if missing:
        raise DataError(f"model {config.path}: {len(missing)} weights are not in its files, first {sorted(missing)[0]}")
    bad = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if bad:
        raise DataError(f"model {config.path}: {len(bad)} weights hold NaN or infinities, first {bad[0]}; give the model's folder anew")
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of unused and missing keys: missing ones are an error here, unused ones are harmless."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    bar = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bar:
            transformers.utils.logging.enable_progress_bar()


def head_of(model: Any) -> nn.Linear:
    """The head that turns hidden states into logits or a value."""
    head = model.get_output_embeddings()
    return model.score if head is None else head


def export_model(model: Any, config: ModelConfig, folder: Path, state: dict[str, Any] | None = None) -> None:
    """Write weights (`state`, if the model's own are not whole), config and tokenizer, so that `from_pretrained` reads the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with _quiet():
        model.save_pretrained(folder, state_dict=state)
        try:
            transformers.AutoTokenizer.from_pretrained(config.path).save_pretrained(folder)
        except _TROUBLE:  # a model without a tokenizer is still a model
            return
