"""Reward functions and datasets written for TRL and for verl, unchanged: the calls they get, and whole runs that train with them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jackfield import registry
from jackfield.config import ComponentSpec, load_config
from jackfield.errors import ConfigError, PluginError, ScoreError
from jackfield.manager import PluginManager
from jackfield.testing import RewardConformance
from jackfield.testing.runs import fake_run
from jackfield.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
TRL, VERL = HERE / "trl_rewards.py", HERE / "verl_reward.py"
TEXT = [{"prompt": f"t{i} t9", "solution": f"t{i}", "task": "maths", "response": "t1 t1 t2", "response_tokens": 3} for i in range(3)]
CHAT = [{**row, "messages": [{"role": "user", "content": row["prompt"]}]} for row in TEXT]


@pytest.fixture
def reward():
    made = []

    def make(name, function, **options):
        made.append(registry.build("reward", ComponentSpec(name=name, options={"function": str(function), "workers": 1, **options})))
        return made[-1]

    yield make
    for each in made:
        each.pool.close()


# ---- TRL: the calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [TEXT, CHAT], ids=["standard", "conversational"])
def test_trl_scores_by_column(reward, records):
    assert reward("trl", f"{TRL}:share").score(records) == pytest.approx([0.0, 2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("records", "prompts", "completions"),
    [
        (TEXT[:1], "['t0 t9']", "['t1 t1 t2']"),
        (CHAT[:1], "[[{'role': 'user', 'content': 't0 t9'}]]", "[[{'role': 'assistant', 'content': 't1 t1 t2'}]]"),
    ],
    ids=["standard", "conversational"],
)
def test_trl_gets_exactly_trls_arguments(reward, records, prompts, completions):
    (failed,) = reward("trl", f"{TRL}:what").score(records)
    columns = ["completion_ids", "log_extra", "log_metric", "solution", "task", "trainer_state"]
    assert f"prompts={prompts} completions={completions} columns={columns}" in str(failed)


def test_trl_coroutines(reward):
    assert reward("trl", f"{TRL}:slow").score(TEXT) == [8.0, 8.0, 8.0]


def test_trl_wrong_number_names_the_function(reward):
    with pytest.raises(PluginError, match=r"trl_rewards\.py:one_missing' returned 2 scores for 3 completions; return one each"):
        reward("trl", f"{TRL}:one_missing").score(TEXT)


def test_trl_raising_costs_its_own_sample(reward):
    scores = reward("trl", f"{TRL}:picky").score([TEXT[0], {**TEXT[1], "task": "code"}, TEXT[2]])
    assert [s if not isinstance(s, ScoreError) else None for s in scores] == [1.0, None, 1.0]
    assert "no code here" in str(scores[1])


def test_trl_function_that_cannot_be_imported(reward):
    mine = reward("trl", f"{TRL}:nothing")
    with pytest.raises(PluginError, match="cannot be imported: AttributeError"):
        mine.configure(SimpleNamespace(manager=PluginManager(), config=SimpleNamespace(rewards=[])))


def test_trl_functions_get_no_gpus(tmp_path):
    with pytest.raises(ConfigError, match=r"reward 'share' \(trl\) runs in processes beside the controller: leave out gpus"):
        fake_run(tmp_path, rewards=[{"name": "trl", "function": f"{TRL}:share", "gpus": 1}])


TASKS = ("maths", "code", "prose")


def rows_of_tasks():
    from jackfield.testing.fakes import FakeDataset

    class Tasks(FakeDataset):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "task": TASKS[index % 3]}

    return Tasks


Tasks = rows_of_tasks()


def test_trl_none_means_does_not_apply(tmp_path):
    """A sample's reward is the sum of the rewards that apply; one without any is not trained on, and is no failure."""
    rewards = [
        {"name": "trl", "function": f"{TRL}:maths_only", "workers": 1, "weight": 3.0, "max_failures": 1},
        {"name": "trl", "function": f"{TRL}:code_only", "workers": 1, "max_failures": 1},
    ]
    run = fake_run(tmp_path, rewards=rewards, dataset=f"{__file__}:Tasks", steps=3)
    for batch, metrics in zip(run.batches, run.metrics, strict=True):
        tasks = [r["task"] for r in batch.records]
        assert batch.rewards.tolist() == [{"maths": 3.0, "code": 2.0}[t] for t in tasks]
        assert batch.loss_mask.any(-1).all()
        assert metrics["reward/maths_only/failed"] == metrics["reward/code_only/failed"] == 0
        drawn = 4 * metrics["prompts/drawn"]  # groups of which nothing is trained are replaced by others
        assert metrics["reward/maths_only/not_applicable"] == drawn - tasks.count("maths")
    assert sum(metrics["prompts/dropped"] for metrics in run.metrics) > 0, "no prompt of the third sort came"


def test_trl_none_beside_another_reward(tmp_path):
    """Where a reward of ours scores the sample, None adds nothing and masks nothing; a reward of weight 0 changes nothing."""
    code = {"name": "trl", "function": f"{TRL}:code_only", "workers": 1}
    rewards = ["jackfield.testing.fakes:FakeReward", code, {**code, "label": "shown", "weight": 0.0}]
    run = fake_run(tmp_path, rewards=rewards, dataset=f"{__file__}:Tasks", steps=1)
    (batch,) = run.batches
    assert batch.loss_mask.any(-1).all()
    more = torch.tensor([2.0 * (r["task"] == "code") for r in batch.records])
    assert torch.equal(batch.rewards, batch.scores["FakeReward"] + more)


def test_trl_token_ids_state_and_metrics(tmp_path):
    rewards = [{"name": "trl", "function": f"{TRL}:short", "workers": 1}]
    run = fake_run(tmp_path, rewards=rewards, steps=2, sampling={"max_new_tokens": 6})
    for step, (batch, metrics) in enumerate(zip(run.batches, run.metrics, strict=True)):
        lengths = batch.response_mask.sum(-1)
        assert torch.equal(batch.rewards, -lengths.float() * (1 + step))
        assert metrics["reward/short/longest"] == lengths.max()
    assert len({int(n) for b in run.batches for n in b.response_mask.sum(-1)}) > 1


# ---- verl: the calls ------------------------------------------------------------------------------------------------------

ROWS = [
    {
        "data_source": "copy",
        "prompt": [{"role": "user", "content": f"t{i} t9"}],
        "ability": "copy",
        "reward_model": {"style": "rule", "ground_truth": f"t{i}"},
        "extra_info": {"split": "train", "index": i},
        "response": "t1 t1 t2" if i else "t0",
    }
    for i in range(3)
]


def test_verl_scores(reward):
    mine = reward("verl", f"{VERL}:compute_score")
    assert mine.score(ROWS) == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert ROWS[0]["extra_info"] == {"split": "train", "index": 0}, "a record is only read"


def test_verl_dicts_and_arguments(reward):
    mine = reward("verl", f"{VERL}:with_details", arguments={"factor": 0.5})
    assert mine.score(ROWS) == [1.0, 4.0, 4.0]
    assert mine.found == {"acc": [1.0, 0.0, 0.0], "turns": [2.0, 2.0, 2.0]}


def test_verl_coroutines_batches_and_failures(reward):
    assert reward("verl", f"{VERL}:asks").score(ROWS) == [2.0, 8.0, 8.0]
    assert reward("verl", f"{VERL}:whole_batch", batched=True).score(ROWS) == [1.0, 0.0, 0.0]
    assert all("no score for t" in str(e) for e in reward("verl", f"{VERL}:raises").score(ROWS))


class TestTRLReward(RewardConformance):
    reward, config, records = "trl", {"function": f"{TRL}:share", "workers": 1}, CHAT


class TestVerlReward(RewardConformance):
    reward, config, records = "verl", {"function": f"{VERL}:compute_score", "workers": 1}, ROWS


# ---- whole runs -----------------------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""The tiny model's tokenizer has none; this one makes a chat the text that the quickstart trains on."""


def rows(count=64):
    copy = registry.build("dataset", ComponentSpec(name="copy", options={"size": count}))
    return [copy[i] for i in range(count)]


def saved(folder: Path, name: str) -> dict:
    """The quickstart's rows in a format of TRL or verl, written as those projects' scripts do; the dataset's entry in the config."""
    found = rows()
    if name == "trl-standard":
        path = folder / "train.jsonl"
        path.write_text("".join(json.dumps({"prompt": r["prompt"], "solution": r["answer"]}) + "\n" for r in found))
        return {"name": "jsonl", "path": str(path)}
    datasets = pytest.importorskip("datasets")
    if name == "trl-conversational":
        made = [{"prompt": [{"role": "user", "content": r["prompt"]}], "solution": r["answer"]} for r in found]
        datasets.Dataset.from_list(made).save_to_disk(folder / "saved")
        return {"name": "hf", "path": str(folder / "saved")}
    made = [
        {
            "data_source": "copy",
            "prompt": [{"role": "user", "content": r["prompt"]}],
            "ability": "copy",
            "reward_model": {"style": "rule", "ground_truth": r["answer"]},
            "extra_info": {"split": "train", "index": i},
        }
        for i, r in enumerate(found)
    ]
    datasets.Dataset.from_list(made[:32]).to_parquet(folder / "a.parquet")
    datasets.Dataset.from_list(made[32:]).to_parquet(folder / "b.parquet")
    return {"name": "parquet", "path": [str(folder / "a.parquet"), str(folder / "b.parquet")]}


def train(folder: Path, **fields) -> list[dict[str, float]]:
    import yaml

    (folder / "template.jinja").write_text(TEMPLATE)
    config = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text()) | {"dir": str(folder / "run"), "steps": 3, "trackers": []}
    config["policy"]["model"]["path"] = str(ROOT / "examples" / "tiny")
    (folder / "run.yaml").write_text(yaml.safe_dump({**config, **fields}))
    with torch.random.fork_rng(devices=[]):
        Trainer(load_config(folder / "run.yaml")).train()
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in row.items() if n in ("step", "reward", "loss", "grad_norm", "response/length")} for row in rows]


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """The same three steps by jackfield's own means: dataset `jsonl`, reward `share`."""
    folder = tmp_path_factory.mktemp("native")
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows()))
    found = train(folder, dataset={"name": "jsonl", "path": str(folder / "rows.jsonl")})
    assert found[0]["grad_norm"] > 0
    return found


@pytest.mark.parametrize("name", ["trl-standard", "trl-conversational", "verl"])
def test_the_quickstart_trains_the_same_from_a_dataset_and_reward_of_others(tmp_path, name, native):
    function = {"name": "verl", "function": f"{VERL}:compute_score"} if name == "verl" else {"name": "trl", "function": f"{TRL}:share"}
    found = train(
        tmp_path,
        dataset=saved(tmp_path, name),
        rewards=[function],
        rollout={"name": "single_turn", "template": str(tmp_path / "template.jinja")},
    )
    assert found == native
