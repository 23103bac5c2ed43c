"""`jackfield check`: the map, and the arithmetic where it cannot fit. Every number is worked out by hand beside it."""

import json

import pytest
from click.testing import CliRunner

from jackfield.errors import ConfigError
from jackfield_check.command import command
from jackfield_check.memory import adapters, elements, frozen, parameters, trained
from jackfield_reshard.families import tensors
from jackfield_reshard.layout import Layout

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
LAYER = 64 * 64 * 2 + 2 * 32 * 64 + 64 + 2 * 32 + 3 * 64 * 128 + 2 * 64
"""q and o; k and v; their biases; gate, up and down; two norms."""
MODEL = 4 * LAYER + 2 * 1000 * 64 + 64


@pytest.fixture
def check(tmp_path):
    """Runs the command on the seed's case at a small model; overrides and options are arguments."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "run.yaml").write_text(
        f"""
policy: {{model: {tmp_path}/model, gpus: 8, backend: {{name: megatron, tp: 2, pp: 2, dtype: bfloat16}}}}
critic: {{gpus: 4, backend: {{name: fsdp, dtype: bfloat16}}}}
engine: {{name: vllm, tp: 2}}
algorithm: {{name: ppo, kl: {{coef: 0.01}}}}
dataset: copy
rewards: [{{name: length, gpus: 2}}]
launcher: ray
"""
    )

    def run(*arguments):
        result = CliRunner().invoke(command, [str(tmp_path / "run.yaml"), *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return run


def test_the_seeds_case_is_mapped_as_written(check):
    lines = check().splitlines()
    assert lines[0] == "launcher ray: 14 of 14 workers in 3 pools"
    rows = {line.split()[1]: line for line in lines[2:7]}
    assert [rows[r].split()[0] for r in ("policy", "reference", "engine", "critic", "length")] == ["0-7", "0-7", "0-7", "8-11", "12-13"]
    assert "megatron tp2 pp2 dp2" in rows["policy"] and "fsdp dp4" in rows["critic"] and "vllm tp2 dp4" in rows["engine"]
    assert "each sync: " in lines[-1] or "each sync: " in lines[-2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "12"], "policy 8 + critic 4 + length 2 = 14 workers at least, but there are 12"),
        (["policy.backend.tp=3"], "policy: backend megatron: 8 GPUs are not a multiple of tp 3 x pp 2 x cp 1 = 6; change policy.gpus"),
        (["policy.gpus=16", "policy.backend.tp=16", "policy.backend.pp=1", "engine.tp=1"], "heads, not divisible by tp 16"),
        (
            ["--gpu-memory", "0.0001"],
            r"GPUs of pool policy: policy [\d.]+ \+ reference [\d.]+ \+ engine [\d.]+ = [\d.]+ GiB, but a GPU has",
        ),
        (["launcher=local"], "policy 8 .* but there are 1"),
    ],
)
def test_what_cannot_fit_is_an_error_with_arithmetic(check, arguments, message):
    with pytest.raises(ConfigError, match=message.replace(" + c", r" \+ c").replace(" + l", r" \+ l")):
        check(*arguments)


def test_what_fits_says_so(check):
    assert check("--gpu-memory", "1").splitlines()[-1].startswith("fits: at most 0.0")


def test_a_model_that_is_elsewhere_leaves_the_map_alone(check):
    output = check("policy.model=some/hub-model")
    assert "some/hub-model is no local folder, so its memory is not known" in output and "0-7  policy" in output


def test_a_model_that_is_elsewhere_is_not_said_to_fit(check):
    last = check("policy.model=some/hub-model", "--gpu-memory", "1").splitlines()[-1]
    assert last.startswith("whether it fits is not known: the memory of policy")


def test_nothing_is_started(check, monkeypatch):
    import subprocess

    monkeypatch.setattr(subprocess, "Popen", None)
    check()


def test_elements_by_hand():
    table = tensors(CONFIG)
    assert parameters(table) == MODEL
    assert elements(table, Layout("torch", dp=3)) == MODEL
    # Stage 0 has two layers and the embedding, stage 1 two layers, the head and the final norm; tensor parallelism halves all but norms.
    norms = 2 * 64
    assert elements(table, Layout("megatron", tp=2, pp=2)) == 2 * ((LAYER - norms) / 2 + norms) + 500 * 64 + 64
    assert elements(table, Layout("fsdp", dp=4)) == MODEL / 4


def test_bytes_by_hand():
    table, options = tensors(CONFIG), {"dtype": "bfloat16"}
    torch = trained(table, Layout("torch"), options, CONFIG, 100)
    assert torch.parts["weights"] == 2 * MODEL and torch.parts["gradients"] == 2 * MODEL and torch.parts["optimizer"] == 12 * MODEL
    assert torch.parts["activations"] == 34 * 100 * 64 * 4
    fsdp = trained(table, Layout("fsdp", dp=4), {**options, "activation_checkpointing": True}, CONFIG, 100)
    assert fsdp.parts["weights"] + fsdp.parts["gradients"] + fsdp.parts["optimizer"] == 16 * MODEL / 4
    assert fsdp.parts["activations"] == 2 * 100 * 64 * 4 + 34 * 100 * 64
    megatron = trained(table, Layout("megatron", dp=2), options, CONFIG, 100)
    assert (megatron.parts["gradients"], megatron.parts["optimizer"]) == (4 * MODEL, 12 * MODEL / 2)
    assert frozen(table, Layout("torch"), {}).total == 4 * MODEL


def test_adapters_by_hand():
    table, options = tensors(CONFIG), {"dtype": "bfloat16", "lora": {"r": 4}}
    query, key, up = 64 + 64, 64 + 32, 64 + 128
    assert adapters(table, {"r": 4}) == 4 * 4 * (2 * query + 2 * key + 3 * up)
    assert adapters(table, {"targets": ["q_proj", "v_proj"]}) == 16 * 4 * (query + key)
    torch = trained(table, Layout("torch"), options, CONFIG, 100)
    assert (torch.parts["weights"], torch.parts["adapters"]) == (2 * MODEL, 16 * adapters(table, {"r": 4}))
    assert "gradients" not in torch.parts and "optimizer" not in torch.parts
    fsdp = trained(table, Layout("fsdp", dp=4), options, CONFIG, 100)
    assert (fsdp.parts["weights"], fsdp.parts["adapters"]) == (MODEL, 4 * adapters(table, {"r": 4}))


def test_a_sync_under_lora_says_what_later_ones_send(check):
    lines = check("policy.backend={name: fsdp, lora: {r: 4}}").splitlines()
    assert lines[-1].endswith(f"later ones send the {adapters(tensors(CONFIG), {'r': 4}):,.0f} elements of the adapters")


def test_the_table_counts_what_transformers_builds():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    assert sum(p.numel() for p in model.parameters()) == MODEL
