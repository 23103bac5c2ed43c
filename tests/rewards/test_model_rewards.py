"""Rewards that are models: `reward_model` and `judge`."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from jackfield import Trainer, load_config
from jackfield.components import WorkerContext
from jackfield.errors import ConfigError, DataError
from jackfield.testing.models import tiny_model
from jackfield_rewards.chat import Remembered, conversation
from jackfield_rewards.judge import Judge
from jackfield_rewards.reward_model import RewardModel

HERE = WorkerContext("reward", torch.device("cpu"), 0)
TEMPLATE = (
    "{% for m in messages %}{{ m.role == 'user' and 't10 ' or 't11 ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}t11 {% endif %}"
)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A random reward model with one output, and one with two."""
    folders = {}
    base = tiny_model(tmp_path_factory.mktemp("base"))
    for labels in (1, 2):
        folder = tmp_path_factory.mktemp(f"labels{labels}")
        config = LlamaConfig.from_pretrained(base, num_labels=labels)
        torch.manual_seed(labels)
        LlamaForSequenceClassification(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        folders[labels] = folder
    return folders


def ready(kind, **options):
    reward = kind(kind.Config(**options))
    reward.setup(HERE)
    return reward


def record(prompt, response, **more):
    return {"prompt": prompt, "response": response, **more}


RAGGED = [record("t5 t6", " t7" * n) for n in (1, 9, 3, 30, 2)]


def alone(folder, text, output=0):
    """The score of one text without batching or padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = -1
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(text)["input_ids"]])
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, output])


@pytest.mark.parametrize("batch_tokens", [1, 40, 100_000])
def test_a_batch_scores_like_its_samples_alone(classifier, batch_tokens):
    reward = ready(RewardModel, model=str(classifier[1]), batch_tokens=batch_tokens)
    expected = [alone(classifier[1], r["prompt"] + r["response"]) for r in RAGGED]
    assert reward.score(RAGGED) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) > 2


def test_the_end_token_as_padding_does_not_move_the_score(classifier):
    reward = ready(RewardModel, model=str(classifier[1]))
    reward.tokenizer.pad_token = reward.tokenizer.eos_token
    records = [record("t5", " t6 <eos>"), record("t5", " t6 t7 t8 <eos> <eos>"), record("t5", " t6 t7 t8 t9 t10 t11")]
    expected = [alone(classifier[1], r["prompt"] + r["response"]) for r in records]
    assert reward.score(records) == pytest.approx(expected, abs=1e-5)


def test_the_conversation_is_put_into_the_reward_models_own_template(classifier, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    reward = ready(RewardModel, model=str(classifier[1]), template=file)
    chat = [{"role": "system", "content": "t4"}, {"role": "user", "content": "t5"}]
    rendered_by_the_policy = record("<|im_start|>user t5<|im_end|>", "t6", messages=chat)
    assert reward.text(rendered_by_the_policy) == "t11 t4 t10 t5 t11 t6 "
    assert reward.text(record("t5", "t6")) == "t10 t5 t11 t6 "
    assert conversation(rendered_by_the_policy)[:2] == chat and "content" in chat[0]


def test_equal_samples_are_scored_once(classifier, monkeypatch):
    reward = ready(RewardModel, model=str(classifier[1]))
    seen = []
    real = reward._forward
    monkeypatch.setattr(reward, "_forward", lambda rows: seen.extend(rows) or real(rows))
    first = reward.score([*RAGGED, RAGGED[0]])
    assert first[0] == first[-1] and len(seen) == len(RAGGED)
    assert reward.score(RAGGED) == first[:-1] and len(seen) == len(RAGGED)
    assert (reward.memory.hits, reward.memory.misses) == (1 + len(RAGGED), len(RAGGED))


def test_memory_is_bounded_and_keeps_what_is_used():
    memory, calls = Remembered(2), []

    def compute(texts):
        calls.extend(texts)
        return [float(len(t)) for t in texts]

    assert memory.through(["a", "bb"], compute) == [1, 2]
    assert memory.through(["a", "ccc"], compute) == [1, 3]
    assert memory.through(["a", "bb"], compute) == [1, 2]
    assert calls == ["a", "bb", "ccc", "bb"] and len(memory.known) == 2
    assert Remembered(0).through(["a", "a"], compute) == [1, 1]


def test_which_output_is_the_score(classifier):
    with pytest.raises(ConfigError, match=r"has 2 outputs \(0 LABEL_0, 1 LABEL_1\): say which one is the score with `output`"):
        ready(RewardModel, model=str(classifier[2]))
    with pytest.raises(ConfigError, match="output is 5, but the model has 2, numbered from 0"):
        ready(RewardModel, model=str(classifier[2]), output=5)
    reward = ready(RewardModel, model=str(classifier[2]), output=1)
    assert reward.score(RAGGED[:1]) == pytest.approx([alone(classifier[2], "t5 t6 t7", 1)], abs=1e-5)


def test_what_is_no_reward_model_is_said(tmp_path):
    with pytest.raises(DataError, match=r"has no weights for score\.weight"):
        ready(RewardModel, model=str(tiny_model(tmp_path / "lm")))
    with pytest.raises(DataError, match="is no usable model"):
        ready(RewardModel, model=str(tmp_path))
    with pytest.raises(ConfigError, match="there is no chat template"):
        ready(Judge, model=str(tmp_path / "lm"), template=Path("nowhere.jinja"))


def test_a_sample_beyond_the_context_has_no_score(classifier):
    reward = ready(RewardModel, model=str(classifier[1]))
    assert reward.score([record("t5", " t6" * 300), record("t5", " t6")])[0] is None


def test_the_judge_reads_and_its_grade_is_found(tmp_path):
    folder = tiny_model(tmp_path / "judge")
    judge = ready(Judge, model=str(folder), question="{prompt} {answer} {response}", pattern=r"t(\d+)", highest=63, max_new_tokens=5)
    records = [record("t5", "t6 t7", answer="t8"), record("t9 t10", "t11", answer="t12"), record("t5", "t6 t7", answer="t8")]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in ("t5 t8 t6 t7", "t9 t10 t12 t11"):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        out = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        expected.append(judge.grade(tokenizer.decode(out, skip_special_tokens=True)))
    assert judge.score(records) == [*expected, expected[0]] and None not in expected
    with pytest.raises(DataError, match="names the field 'answer', but the row has prompt, response"):
        judge.score([record("t5", "t6")])


def test_votes_are_averaged_and_do_not_depend_on_company(tmp_path):
    options = {"model": str(tiny_model(tmp_path / "judge")), "question": "{prompt} {response}", "pattern": r"t(\d+)", "highest": 63}
    judge = ready(Judge, **options, votes=4, temperature=1.0, max_new_tokens=3, remember=0)
    several = judge.score([record("t5", "t6"), record("t7", "t8")])
    assert judge.score([record("t7", "t8")]) == several[1:] and 0 <= several[0] <= 1


@pytest.mark.parametrize(
    ("text", "score"), [("Grade: 7", 0.7), ("Grade: 2 no, Grade: 10.0", 1.0), ("Grade: 11", None), ("good", None), ("Grade: -1", None)]
)
def test_grades(text, score):
    assert Judge(Judge.Config(model="m")).grade(text) == score


@pytest.mark.parametrize(
    ("options", "message"),
    [({"pattern": "x"}, "needs a group"), ({"votes": 3}, "3 votes at temperature 0"), ({"lowest": 10.0}, "must be above lowest")],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Judge.Config(model="m", **options)


def test_a_reward_model_and_a_judge_in_a_run_on_workers_and_in_process(classifier, tmp_path):
    folder = tiny_model(tmp_path / "judge")
    grading = "question: '{prompt} {response}', pattern: 't(\\d+)', highest: 63, max_new_tokens: 3"
    judge = f"{{name: judge, model: {folder}, {grading}, weight: 0}}"
    results = []
    for place, launcher in (("", "local"), (", gpus: 2", "fork")):
        rewards = f"[{{name: reward_model, model: {classifier[1]}{place}}}, {judge}]"
        workers = ["launcher.workers=3", "launcher.device=cpu"] if launcher == "fork" else []
        overrides = [f"dir={tmp_path / launcher}", f"rewards={rewards}", f"launcher.name={launcher}", *workers, "steps=1", "trackers=[]"]
        run = Trainer(load_config(Path(__file__).parents[1] / "core" / "fake.yaml", overrides)).train()
        assert run.metrics["reward/reward_model/failed"] == 0
        results.append([run.metrics["reward/reward_model"], run.metrics["reward"]])
    assert results[0] == pytest.approx(results[1], abs=1e-5)
