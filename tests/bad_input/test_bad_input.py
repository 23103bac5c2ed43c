"""Bad input through the command line: exit code 2, one line with a way out, no traceback, nothing half written."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jackfield import cli
from jackfield.testing.models import tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 100_000
"""Bytes that a file may have where the disk is to be full: less than the tiny model."""


@pytest.fixture
def main(monkeypatch, capfd):
    """Runs `jackfield train`; returns the exit code and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["jackfield", "train", *words])
        capfd.readouterr()
        try:
            cli.main()
        except SystemExit as ended:
            return ended.code, capfd.readouterr().err
        return 0, capfd.readouterr().err

    return run


@pytest.fixture
def train(tmp_path, main):
    """Runs the quickstart, smaller; the run's folder is tmp_path/run."""

    def run(*overrides, config=EXAMPLES / "quickstart.yaml"):
        settings = [f"dir={tmp_path / 'run'}", f"policy.model.path={EXAMPLES / 'tiny'}", "steps=2", "trackers=[]", "batch.prompts=2"]
        return main(str(config), *settings, *overrides)

    return run


def refused(result, *words):
    """Exit code 2 and one line on stderr that holds the words."""
    code, err = result
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def test_missing_model(train, tmp_path):
    refused(
        train(f"policy.model.path={tmp_path / 'nothing'}"),
        "there is no folder",
        "nothing",
        "give a local Hugging Face folder or a hub name",
    )
    assert not (tmp_path / "run").exists()


def test_folder_without_a_model(train, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(train(f"policy.model.path={tmp_path / 'empty'}"), "holds no config.json")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["cut", "header", "gone"])
def test_corrupt_safetensors(train, tmp_path, damage):
    model = tiny_model(tmp_path / "model")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    match damage:
        case "cut":
            weights.write_bytes(whole[: len(whole) // 2])
        case "header":
            weights.write_bytes(b"\xff" * 64 + whole[64:])
        case "gone":
            weights.unlink()
    refused(train(f"policy.model.path={model}", "policy.model.init=pretrained"), str(model), "give a complete Hugging Face folder")
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_all_there(train, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    refused(train(f"policy.model.path={model}", "policy.model.init=pretrained"), "1 weights", "model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(train, tmp_path, value):
    from safetensors.torch import load_file, save_file

    model = tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = value
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    result = train(f"policy.model.path={model}", "policy.model.init=pretrained")
    refused(result, "1 weights hold NaN or infinities", "model.layers.1.mlp.up_proj.weight")


def test_a_tokenizer_of_another_model(train, tmp_path):
    model = tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 5}))
    refused(train(f"policy.model.path={model}"), "prompt 0 has token ", "the model's vocab_size is 5", "another model's tokenizer")
    (model / "config.json").write_text("{}")
    refused(train(f"policy.model.path={model}"), "config.json cannot be used", "model_type", "give a Hugging Face folder")


def test_a_policy_with_a_value_head(train, tmp_path):
    refused(train("policy.model.head=value"), "policy.model.head is 'value', with which nothing can be sampled: leave it out")


def test_resuming_on_another_backend(train, tmp_path):
    assert train("steps=1")[0] == 0
    refused(train("policy.backend=fsdp"), "policy.backend was torch and is fsdp", "start in another dir")


def test_empty_dataset(train, tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    refused(train("dataset.name=jsonl", f"dataset.path={tmp_path / 'rows.jsonl'}"), "rows.jsonl is empty", "give a dataset")
    assert not (tmp_path / "run").exists()


def test_missing_dataset(train, tmp_path):
    refused(train("dataset.name=jsonl", f"dataset.path={tmp_path / 'rows.jsonl'}"), "there is no", "rows.jsonl", "correct the path")


def test_bad_line_in_the_dataset(train, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "t1", "answer": "t1"}\n{"prompt": \n')
    refused(train("dataset.name=jsonl", f"dataset.path={tmp_path / 'rows.jsonl'}"), "rows.jsonl:2: not JSON", "correct or remove the line")


def test_prompt_longer_than_the_context(train, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": " ".join(["t1"] * 121), "answer": "t1"}))
    result = train("dataset.name=jsonl", f"dataset.path={tmp_path / 'rows.jsonl'}")
    refused(result, "121 tokens, but context 128 - max_new_tokens 8 = 120", "rollout.overlong=drop")
    assert not (tmp_path / "run").exists()


def rows(tmp_path, *lines):
    """An override that names a data set of these lines."""
    (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return f"dataset={{name: jsonl, path: '{tmp_path / 'rows.jsonl'}'}}"


def test_prompts_that_are_all_dropped(train, tmp_path):
    row = json.dumps({"prompt": " ".join(["t1"] * 121), "answer": "t1"})
    code, err = train(rows(tmp_path, row), "rollout.overlong=drop", "trackers=[console]")
    assert code == 0
    assert "skipped 1" in err and "rollout/overlong 20" in err


@pytest.mark.parametrize("reward", ["share", "exact", "last_number", "math"])
def test_a_row_without_an_answer(train, tmp_path, reward):
    if reward == "math":
        pytest.importorskip("math_verify")
    result = train(rows(tmp_path, '{"prompt": "t1", "gold": "t1"}'), f"rewards=[{reward}]")
    refused(result, "reads field 'answer', which row 0 lacks: it has prompt, gold", "`answer`", "dataset.columns")
    assert not (tmp_path / "run").exists()
    assert train(rows(tmp_path, '{"prompt": "t1", "gold": "3"}'), f"rewards=[{{name: {reward}, answer: gold}}]", "steps=0")[0] == 0


def test_rows_that_no_tokenizer_reads(train, tmp_path):
    refused(
        train(rows(tmp_path, r'{"prompt": "t1 \ud83d", "answer": "t1"}')), "prompt 0 cannot be rendered or tokenized", "correct the row"
    )
    refused(train(rows(tmp_path, '{"messages": ["a", "b"], "answer": "t1"}')), "prompt 0 has no usable `prompt`")
    refused(train(rows(tmp_path, '{"messages": [{"role": "user", "content": "a"}], "answer": "t1"}')), "the tokenizer has no chat template")


def test_an_override_below_another(train, tmp_path):
    refused(train(rows(tmp_path, '{"prompt": "t1"}'), "dataset.limit=0"), "dataset 'jsonl': limit: Input should be greater than 0")


def test_unknown_plugin(train, tmp_path):
    refused(train("algorithm=grop"), "no algorithm is called 'grop'", "did you mean", "'grpo'", "jackfield plugins")
    refused(train("rewards=[exakt]"), "no reward is called 'exakt'", "'exact'")
    refused(train("rewards=[nowhere.py:fn]"), "nowhere.py")
    refused(train("-p", "samples"), "no hooks is called 'samples'; 'samples' is of kind tracker")
    refused(train("engine.colocate=polizy"), "engine.colocate is 'polizy', which is no role of this run: choose from policy")
    assert not (tmp_path / "run").exists()


def test_mistyped_field(train, tmp_path):
    refused(train("batch.group_sise=4"), "batch.group_sise", "did you mean 'group_size'")
    refused(train("dataset.name=copy", "dataset.word=3"), "unknown field 'word'", "did you mean 'words'")
    refused(train("steps=many"), "steps", "'many'")
    assert not (tmp_path / "run").exists()


def test_group_of_one_with_grpo(train, tmp_path):
    refused(train("batch.group_size=1"), "'grpo'", "batch.group_size is 1", "at least 2")
    assert not (tmp_path / "run").exists()


def test_greedy_samples_with_grpo(train, tmp_path):
    refused(train("sampling.temperature=0"), "'grpo' compares samples of one prompt", "temperature 0 makes them the same: raise it")
    assert not (tmp_path / "run").exists()
    assert train("sampling.temperature=0", "algorithm=reinforce_pp", "steps=0")[0] == 0


def test_what_a_run_needs_is_left_out(train, tmp_path):
    refused(train("-p", "no:single_turn"), "no result came back from hook 'rollout' of no plugin at all")
    refused(train("-p", "no:share"), "no:share leaves out a plugin that this run does not have; did you mean 'reward share'?")


def test_more_mini_batches_than_groups(train, tmp_path):
    refused(train("algorithm.mini_batches=3"), "algorithm.mini_batches is 3", "2 groups of batch.prompts")
    assert not (tmp_path / "run").exists()


def test_config_file(train, main, tmp_path):
    refused(train(config=tmp_path / "none.yaml"), "there is no config file")
    (tmp_path / "torn.yaml").write_text("policy: {model: [")
    refused(train(config=tmp_path / "torn.yaml"), "torn.yaml")
    (tmp_path / "empty.yaml").write_text("")
    refused(train(config=tmp_path / "empty.yaml"), "field")
    (tmp_path / "number.yaml").write_text((EXAMPLES / "quickstart.yaml").read_text() + "5: x\n")
    refused(train(config=tmp_path / "number.yaml"), "number.yaml", "Keys should be strings")
    (tmp_path / "bare.yaml").write_text("policy: {}\nalgorithm: grpo\ndataset: copy\nrewards: [share]\n")
    config = str(tmp_path / "bare.yaml")
    refused(main(config, f"dir={tmp_path / 'run'}"), "policy.model is missing: name a local Hugging Face folder or a hub model")
    refused(train("steps"), "'steps' is not of the form field.subfield=value")


def test_run_folder_that_is_a_file(train, tmp_path):
    (tmp_path / "run").write_text("something else")
    refused(train(), "cannot be used as the run's folder", "choose another dir")
    assert (tmp_path / "run").read_text() == "something else"


def test_export_of_a_folder_that_is_not_there(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["jackfield", "export", str(tmp_path / "nowhere"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    refused((ended.value.code, capfd.readouterr().err), "nowhere is no folder: give the run's own")


def test_export_of_a_checkpoint_without_its_config(train, tmp_path, monkeypatch, capfd):
    assert train("steps=1")[0] == 0
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "config.json").write_text("{")
    monkeypatch.setattr(sys, "argv", ["jackfield", "export", str(tmp_path / "run"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    refused((ended.value.code, capfd.readouterr().err), "step-00000001 has no readable config.json", "export another step")
    assert not (tmp_path / "out").exists()


def test_disk_full_while_a_checkpoint_is_written(train, tmp_path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if (tmp_path / "run" / "checkpoints" / ".partial-00000002").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    result = train("checkpoint.every=1")
    monkeypatch.undo()
    refused(result, "step-00000002 cannot be written", "No space left on device", "the earlier ones are untouched")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_disk_full_within_a_weights_file(tmp_path):
    """The file-size limit makes real writes fail inside the libraries that write tensors, as a full disk does."""
    settings = [f"dir={tmp_path / 'run'}", f"policy.model.path={EXAMPLES / 'tiny'}", "steps=1", "trackers=[]", "batch.prompts=2"]
    result = subprocess.run(
        [sys.executable, "-c", "from jackfield.cli import main; main()", "train", str(EXAMPLES / "quickstart.yaml"), *settings],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    refused((result.returncode, result.stderr), "step-00000001 cannot be written", "the earlier ones are untouched")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
