"""Foreign code that is broken in ways that a hook's result or its own exception does not cover: one line, and whose it is."""

import json
from pathlib import Path

import pytest
import torch

from jackfield import Algorithm, Component, ComponentConfig, Dataset, LossOutput, checkpoint, hookimpl
from jackfield.errors import CheckpointError, DataError, JackfieldError, PluginError
from jackfield.testing.runs import fake_run


def here(name: str) -> str:
    return f"{__file__}:{name}"


def line(mark: str) -> str:
    """`file:line` of the line that ends in this comment."""
    numbers = [n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"# {mark}")]
    return f"({__file__}:{numbers[0]})"


def message(error, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        fake_run(*args, **kwargs)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, JackfieldError)
    return str(caught.value)


class Plain(Algorithm):
    def advantage(self, batch):
        return batch.replace(advantages=batch.loss_mask.float())

    def loss(self, outputs, batch):
        return LossOutput(outputs.log_probs)


class Unbuilt(Component):
    def __init__(self, config):
        raise ValueError("no\nway")  # unbuilt


class PlainUnbuilt:
    def __init__(self):
        raise ValueError("no")


class Needy(Plain):
    @property
    def needs(self):
        return super().needs.greedy  # needs


class ForeignConfig(Plain):
    class Config(ComponentConfig):
        x: int = 1


class Unsaved(Plain):
    def state_dict(self):
        return {**super().state_dict(), "table": torch.zeros(2)}


class Unrewarded(Plain):
    def advantage(self, batch):
        return super().advantage(batch).replace(rewards=None)


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise OSError("torn page")  # torn
        return {"prompt": f"{index}"}


class Standing:
    @hookimpl
    def step(self, run):
        return {}


class Scores:
    def __init__(self, values):
        self.values = values

    @hookimpl
    def score(self, run, batch):
        return self.values(batch)


class Reports:
    @hookimpl
    def step_end(self, run, metrics):
        metrics["mine"] = torch.ones(2)


class Bad:
    @hookimpl
    def step_start(self, run):
        raise ValueError("the cause")

    @hookimpl
    def run_error(self, run, error):
        raise ValueError("while cleaning up")


def test_what_cannot_be_built(tmp_path):
    text = message(PluginError, tmp_path, hooks=[here("Unbuilt")])
    assert text == f"hooks '{here('Unbuilt')}' cannot be built: ValueError: no way {line('unbuilt')}"
    assert "PlainUnbuilt' cannot be built: ValueError: no" in message(PluginError, tmp_path, hooks=[here("PlainUnbuilt")])
    assert "ForeignConfig' cannot be built: AttributeError: 'Config' object" in message(
        PluginError, tmp_path, algorithm=here("ForeignConfig")
    )


def test_needs_that_raises(tmp_path):
    text = message(PluginError, tmp_path, algorithm=here("Needy"))
    assert text.endswith(f"raised in hook 'needs': AttributeError: 'Needs' object has no attribute 'greedy' {line('needs')}")


def test_a_file_that_exits(tmp_path):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    text = message(PluginError, tmp_path, algorithm=f"{tmp_path}/exits.py:A")
    assert text.endswith(f"exits.py:A' cannot be imported: SystemExit: 3 ({tmp_path}/exits.py:2)")


def test_a_state_that_cannot_be_saved(tmp_path):
    text = message(CheckpointError, tmp_path, steps=1, algorithm=here("Unsaved"))
    assert "cannot be written: Object of type Tensor is not JSON serializable; the earlier ones are untouched" in text
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_batch_without_rewards(tmp_path):
    text = message(PluginError, tmp_path, algorithm=here("Unrewarded"))
    assert "returned from hook 'advantage' rewards as NoneType; a tensor of shape [16] is wanted" in text


def test_a_row_that_raises(tmp_path):
    assert message(DataError, tmp_path, dataset=here("Rows")) == f"dataset Rows raised for row 5: OSError: torn page {line('torn')}"


def test_a_step_that_does_not_step(tmp_path):
    text = message(PluginError, tmp_path, plugins=[Standing()])
    assert text == "hook 'step' was answered, but run.step is 0 as before: raise it by 1, or return None"


def test_scores_of_another_type(tmp_path):
    text = message(PluginError, tmp_path, plugins=[Scores(lambda batch: {"a": torch.zeros(len(batch), dtype=torch.long)})])
    assert "returned from hook 'score' a of shape [16], torch.int64; torch.float32 of shape [16] is wanted" in text
    text = message(PluginError, tmp_path, rewards=[], plugins=[Scores(lambda batch: {})])
    assert text.startswith("no result came back from hook 'score' of Scores: ")


def test_a_metric_that_is_no_number(tmp_path):
    assert message(PluginError, tmp_path, plugins=[Reports()]).startswith("metric 'mine' is tensor([1., 1.]), no number: the plugin that")


def test_cleaning_up_does_not_hide_the_cause(tmp_path):
    assert "raised in hook 'step_start': ValueError: the cause" in message(PluginError, tmp_path, plugins=[Bad()])


def test_a_numpy_or_tensor_scalar_is_a_number(tmp_path):
    class Fine:
        @hookimpl
        def step_end(self, run, metrics):
            metrics |= {"tensor": torch.tensor(1.5), "flag": True}

    fake_run(tmp_path, steps=1, plugins=[Fine()])
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["tensor"], row["flag"]) == (1.5, 1.0)
    assert checkpoint.complete(tmp_path)
