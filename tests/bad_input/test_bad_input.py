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
def train(tmp_path, monkeypatch, capfd):
    """Runs `jackfield train` on the quickstart, smaller; returns the exit code and stderr. The run's folder is tmp_path/run."""

    def run(*overrides, config=EXAMPLES / "quickstart.yaml"):
        settings = [f"dir={tmp_path / 'run'}", f"policy.model.path={EXAMPLES / 'tiny'}", "steps=2", "trackers=[]", "batch.prompts=2"]
        monkeypatch.setattr(sys, "argv", ["jackfield", "train", str(config), *settings, *overrides])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capfd.readouterr().err

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


def test_unknown_plugin(train, tmp_path):
    refused(train("algorithm=grop"), "no algorithm is called 'grop'", "did you mean", "'grpo'", "jackfield plugins")
    refused(train("rewards=[exakt]"), "no reward is called 'exakt'", "'exact'")
    refused(train("rewards=[nowhere.py:fn]"), "nowhere.py")
    assert not (tmp_path / "run").exists()


def test_mistyped_field(train, tmp_path):
    refused(train("batch.group_sise=4"), "batch.group_sise", "did you mean 'group_size'")
    refused(train("dataset.name=copy", "dataset.word=3"), "unknown field 'word'", "did you mean 'words'")
    refused(train("steps=many"), "steps", "'many'")
    assert not (tmp_path / "run").exists()


def test_group_of_one_with_grpo(train, tmp_path):
    refused(train("batch.group_size=1"), "'grpo'", "batch.group_size is 1", "at least 2")
    assert not (tmp_path / "run").exists()


def test_more_mini_batches_than_groups(train, tmp_path):
    refused(train("algorithm.mini_batches=3"), "algorithm.mini_batches is 3", "2 groups of batch.prompts")
    assert not (tmp_path / "run").exists()


def test_config_file(train, tmp_path):
    refused(train(config=tmp_path / "none.yaml"), "there is no config file")
    (tmp_path / "torn.yaml").write_text("policy: {model: [")
    refused(train(config=tmp_path / "torn.yaml"), "torn.yaml")
    (tmp_path / "empty.yaml").write_text("")
    refused(train(config=tmp_path / "empty.yaml"), "field")
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
