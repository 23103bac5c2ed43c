"""DataFlow computes the plain step bit for bit, and a `forward` of one's own changes what is computed; the example of the docs trains."""

import json
import re
import sys
from pathlib import Path

import pytest

import jackfield
from jackfield import DataFlow, PPOTrainer, get_ppo_config
from jackfield.batch import Batch
from jackfield.errors import CheckpointError, ConfigError
from jackfield.testing.runs import fake_config, fake_run
from jackfield.trainer import Trainer

ROOT = Path(__file__).parents[2]


class Twice(DataFlow):
    """Two updates on the same samples."""

    def forward(self, inputs):
        batch = self.score(self.generate(inputs))
        self.update(batch)
        return self.update(batch)


class InHalves(DataFlow):
    """The second half of the prompts is answered by what the first half taught."""

    def forward(self, inputs):
        half = len(inputs) // 2
        parts = [self.update(self.score(self.generate(part))) for part in (inputs[:half], inputs[half:])]
        return Batch.concat(parts)


class OneStepLate(DataFlow):
    """Updates on the samples of the step before, then samples the next from the weights that came of it."""

    last = None

    def forward(self, inputs):
        if self.last is not None:
            self.update(self.last)
        self.last = self.score(self.generate(inputs))
        return self.last


class OneInTwo:
    """Rejects every other group, so that a step takes more than one draw."""

    @jackfield.hookimpl
    def filter(self, run, batch):
        return batch.group_ids % 2 == 0


class Calls:
    """Notes the order of the stages, and the versions of what is scored."""

    def __init__(self):
        self.stages, self.versions = [], []

    @jackfield.hookimpl(tryfirst=True)
    def rollout(self, run, prompts):
        self.stages.append("rollout")

    @jackfield.hookimpl(tryfirst=True)
    def score(self, run, batch):
        self.versions.append(int(batch.versions.max()))
        return {}

    @jackfield.hookimpl(tryfirst=True)
    def update(self, run, batch):
        self.stages.append("update")

    @jackfield.hookimpl
    def weights_synced(self, run, report):
        self.stages.append("sync")


@pytest.mark.parametrize("algorithm", ["jackfield.testing.runs:FakeAlgorithm", "ppo", "remax"])
def test_the_default_flow_is_the_plain_step(tmp_path, algorithm):
    """With rejected groups and further draws, and with a greedy baseline (remax) or a critic (ppo)."""
    fields = {"algorithm": algorithm, "critic": {"optimizer": {"lr": 0.5}}}
    plain = fake_run(tmp_path / "plain", [OneInTwo()], **fields)
    flow = fake_run(tmp_path / "flow", [OneInTwo()], hooks=["flow"], **fields)
    assert plain.same_training(flow)
    assert plain.metrics == flow.metrics
    assert plain.metrics[0]["prompts/drawn"] > plain.metrics[0]["prompts/trained"] == 4


@pytest.mark.parametrize(
    ("flow", "stages", "versions"),
    [
        (DataFlow, ["rollout", "update", "sync"] * 2, [0, 1]),
        (Twice, ["rollout", "update", "update", "sync"] * 2, [0, 1]),
        (InHalves, ["rollout", "update", "sync"] * 4, [0, 1, 1, 2]),
        (OneStepLate, ["rollout", "sync", "update", "sync", "rollout", "sync"], [0, 2]),
    ],
)
def test_forward_is_the_order_of_the_stages(tmp_path, flow, stages, versions):
    calls = Calls()
    changed = fake_run(tmp_path / "changed", [calls, flow()], steps=2)
    assert calls.stages == stages
    assert calls.versions == versions
    plain = fake_run(tmp_path / "plain", steps=2)
    assert plain.same_training(changed) == (flow is DataFlow)
    assert changed.run.step == 2 and len(changed.metrics) == 2


def test_two_updates_move_further_than_one(tmp_path):
    start = fake_run(tmp_path / "start", steps=0).weights
    once, twice = (fake_run(tmp_path / f.__name__, [f()], steps=1).weights for f in (DataFlow, Twice))
    for name, before in start.items():
        assert (twice[name] - before).norm() > 1.2 * (once[name] - before).norm() > 0


def test_halves_are_filled_up_by_themselves(tmp_path):
    seen = fake_run(tmp_path, [OneInTwo(), InHalves()], steps=1)
    assert [len(set(i // 4 for i in ids)) for ids in seen.sample_ids] == [2, 2]
    assert seen.metrics[0]["prompts/trained"] == 4


class NeverScores(DataFlow):
    def forward(self, inputs):
        return self.update(self.generate(inputs))


class ReturnsNothing(DataFlow):
    def forward(self, inputs):
        self.update(self.score(self.generate(inputs)))


@pytest.mark.parametrize(("flow", "message"), [(NeverScores, "update needs rewards"), (ReturnsNothing, "returned None: return the scored")])
def test_what_forward_must_do(tmp_path, flow, message):
    with pytest.raises(ConfigError, match=rf"{flow.__name__}.forward.*{message}"):
        fake_run(tmp_path, [flow()])


def test_a_trainer_takes_a_flow_and_a_resumed_run_wants_it_back(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_flows", type(sys)("my_flows"))
    flow = type("Late", (OneStepLate,), {"__module__": "my_flows"})
    sys.modules["my_flows"].Late = flow
    run = PPOTrainer(fake_config(tmp_path, steps=1), data_flow=flow).train()
    assert run.plugins["my_flows:Late"]["stages"] == ["step"]
    with pytest.raises(CheckpointError, match="my_flows:Late is gone"):
        Trainer(fake_config(tmp_path, steps=2)).train()
    assert PPOTrainer(fake_config(tmp_path, steps=2), data_flow=flow).train().step == 2
    with pytest.raises(ConfigError, match="top level of a module"):
        PPOTrainer(fake_config(tmp_path), data_flow=type("Local", (DataFlow,), {}))


def test_get_ppo_config():
    config = get_ppo_config(
        model_name="owner/model", overrides=["batch.prompts=32", "critic.optimizer.lr=0.5"], steps=7, rewards=["length"]
    )
    assert (config.policy.model.path, config.algorithm.name, config.steps) == ("owner/model", "ppo", 7)
    assert (config.batch.prompts, config.critic.optimizer.lr, config.rewards[0].name) == (32, 0.5, "length")
    with pytest.raises(ConfigError, match="stepz"):
        get_ppo_config(model_name="owner/model", stepz=1)


def test_names_of_plugins_are_found_in_jackfield_alone():
    with pytest.raises(AttributeError, match="no attribute 'PPOTrainerr'"):
        _ = jackfield.PPOTrainerr
    assert not hasattr(jackfield, "ppo")


def test_the_examples_of_the_docs_train(tmp_path, monkeypatch):
    """The page's scripts as they stand, with fewer steps: the first learns, and the second goes another way from the first update on."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "coming-from-verl.md").read_text(), re.S)
    assert len(blocks) == 2 and "class TwoPasses(DataFlow)" in blocks[1]
    monkeypatch.chdir(ROOT)
    found = []
    for block, steps in zip(blocks, (30, 2), strict=True):
        module, folder = type(sys)(f"docs_example_{steps}"), tmp_path / str(steps)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        short = block.replace("steps=200", f'steps={steps}, dir="{folder}", trackers=[]')
        assert short != block
        exec(compile(short, folder.name, "exec"), vars(module))
        found.append([json.loads(line)["reward"] for line in (folder / "metrics.jsonl").read_text().splitlines()])
    one, two = found
    assert len(one) == 30 and sum(one[-5:]) > 3 * sum(one[:5])
    assert one[0] == two[0] and one[1] != two[1]


def test_a_flow_that_nothing_scores_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"DataFlow\.forward calls score, but nothing scores the samples: name a reward"):
        fake_run(tmp_path, rewards=[], hooks=["flow"])
