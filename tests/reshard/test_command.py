"""`jackfield plan`: text, numbers and picture of a configuration, with nothing started and no torch imported."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from jackfield.errors import ConfigError
from jackfield_reshard.command import command

MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    file = tmp_path / "run.yaml"
    backend = "{name: megatron, tp: 2, pp: 2, ep: 2, dtype: bfloat16}"
    text = f"policy: {{model: {tmp_path}, backend: {backend}}}\nengine: {{name: vllm, tp: 2}}\nalgorithm: grpo\ndataset: words\n"
    file.write_text(text)
    return str(file)


def test_text_and_picture(config, tmp_path):
    for suffix in ("png", "svg"):
        result = CliRunner().invoke(command, [config, "--draw", str(tmp_path / f"plan.{suffix}"), "--moves", "1"])
        assert result.exit_code == 0, result.output
        assert (tmp_path / f"plan.{suffix}").stat().st_size > 5000
    text = result.output
    assert "megatron tp2 pp2 ep2: 4 ranks" in text and "vllm tp2 dp2: 4 ranks" in text
    assert "bytes equal the lower bound" in text
    assert "model.layers.3.mlp.experts.down_proj.weight" in text


def test_flows_are_counted_where_something_travels(config, tmp_path):
    (tmp_path / "here.yaml").write_text(f"policy: {{model: {tmp_path}}}\nengine: vllm\nalgorithm: grpo\ndataset: words\n")
    here, apart = (CliRunner().invoke(command, [str(file)]).output for file in (tmp_path / "here.yaml", config))
    assert "sent        0 B inside nodes, 0 B between nodes, in 0 flows" in here
    assert "in 0 flows" not in apart and " flows" in apart


def test_json_totals(config):
    def totals(*arguments):
        return json.loads(CliRunner().invoke(command, [config, "--json", *arguments]).output)

    alone, apart = totals(), totals("--engine-gpus", "2", "--gpus", "4")
    assert alone["errors"] == apart["errors"] == []
    assert alone["sent_bytes"] == alone["bound_bytes"] > 0 < alone["local_bytes"]
    assert (apart["local_bytes"], apart["engine"]) == (0, "vllm tp2")
    assert totals("--place", "overlap")["sent_bytes"] <= alone["sent_bytes"]


def test_errors_show_the_arithmetic(config):
    result = CliRunner().invoke(command, [config, "--gpus", "6"])
    assert isinstance(result.exception, ConfigError)
    assert "6 GPUs are not a multiple of tp 2 x pp 2 x cp 1 = 4" in str(result.exception)


def test_planning_imports_no_torch(config):
    code = (
        "import sys; from jackfield_reshard.command import command\n"
        f"try: command(['{config}'])\n"
        "except SystemExit as done: assert done.code == 0, done.code\n"
        "assert 'torch' not in sys.modules, 'planning must not need torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
