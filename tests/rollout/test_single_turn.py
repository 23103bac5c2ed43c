"""Rollout `single_turn`: order, seeds, prompts, chat templates, the context's limit."""

from __future__ import annotations

import pytest
import torch
from rollout_helpers import RulePolicy, make_run

from jackfield.batch import Batch, Prompt
from jackfield.components import Sample
from jackfield.errors import ConfigError, DataError, WorkerError
from jackfield.testing.models import EOS, tiny_model
from jackfield_rollout.seeds import gather, sample_seed
from jackfield_rollout.single_turn import SingleTurn


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), max_positions=16)


def by_prompt(request, index):
    """Each sample says which prompt and which index it is: 10 x the first token + index."""
    return [request.tokens[0], 10 + index, EOS], "stop"


def prompts(*texts, first=0, **fields):
    return [Prompt(first + k, {"prompt": t, "row": k, **fields}) for k, t in enumerate(texts)]


def collect(model, rows, *, policy=None, options=None, data=(), **run):
    rollout = SingleTurn(SingleTurn.Config(**(options or {})))
    run = make_run(model, policy or RulePolicy(by_prompt), rows=data, **run)
    rollout.configure(run)
    return rollout.rollout(run, rows), run


@pytest.mark.parametrize("shuffle", range(5))
def test_samples_land_in_order_whatever_the_order_of_finish(model, shuffle):
    batch, _ = collect(model, prompts("t1", "t2", "t3 t4"), policy=RulePolicy(by_prompt, shuffle), group_size=3)
    assert batch.tokens[:, 0].tolist() == [5, 5, 5, 6, 6, 6, 7, 7, 7]
    last = [row[int(n) - 2] for row, n in zip(batch.tokens.tolist(), batch.lengths, strict=True)]
    assert last == [10, 11, 12] * 3
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert batch.sample_ids.tolist() == list(range(9))


def test_fields_of_the_batch(model):
    batch, run = collect(model, prompts("t1 t2", "t3", answer="t9"), group_size=1)
    assert batch.tokens.tolist() == [[5, 6, 5, 10, EOS], [7, 7, 10, EOS, 0]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 1, 0]]
    assert torch.equal(batch.loss_mask, batch.response_mask)
    assert batch.rollout_log_probs.tolist() == [[0, 0, -0.5, -1.5, -2.5], [0, -0.5, -1.5, -2.5, 0]]
    assert batch.versions.tolist() == [[-1, -1, 7, 7, 7], [-1, 7, 7, 7, -1]]
    records = list(batch.records)
    assert records[1] == {
        "prompt": "t3",
        "response": "t3 t6",
        "answer": "t9",
        "row": 1,
        "response_tokens": 3,
        "finish_reason": "stop",
    }
    assert run.metrics == {"rollout/overlong": 0.0, "rollout/aborted": 0.0}


def test_seeds_depend_on_run_step_and_sample_alone(model):
    def seeds(rows, **run):
        policy = RulePolicy(by_prompt)
        collect(model, rows, policy=policy, **run)
        return {r.id: r.seeds for r in policy.calls[0]}

    both = seeds(prompts("t1", "t2"))
    assert seeds(prompts("t2", first=1))[1] == both[1], "a prompt drawn alone has the seeds it had in company"
    assert len({s for group in both.values() for s in group}) == 4
    assert seeds(prompts("t1"), step=6)[0] != both[0]
    assert seeds(prompts("t1"), seed=4)[0] != both[0]


def test_seed_values_are_fixed():
    """Pinned: a change would make resumed runs diverge from the runs that they continue."""
    assert sample_seed(0, 0, 0) == 6922409923716774167
    assert sample_seed(3, 5, 1) == 6016533569337090371
    assert sample_seed(3, 5, 1, turn=1) != sample_seed(3, 5, 1)


def test_engine_that_loses_doubles_or_invents_samples_is_an_error(model):
    requests = RulePolicy(by_prompt)
    collect(model, prompts("t1"), policy=requests, group_size=2)
    (request,) = requests.calls[0]

    def sample(index, request_id=0):
        return Sample(request_id, index, [1], [0.0], [0], "stop")

    with pytest.raises(WorkerError, match=r"returned 1 of 2 samples.*sample 1 of request 0"):
        gather([request], [sample(0)])
    with pytest.raises(WorkerError, match="twice"):
        gather([request], [sample(0), sample(0), sample(1)])
    with pytest.raises(WorkerError, match="nobody asked"):
        gather([request], [sample(0), sample(1), sample(2)])


def test_aborted_samples_stay_but_are_not_trained_on(model):
    def answer(request, index):
        return ([8], "abort") if index else ([8, EOS], "stop")

    batch, run = collect(model, prompts("t1"), policy=RulePolicy(answer))
    assert batch.loss_mask.any(-1).tolist() == [True, False]
    assert batch.response_mask.any(-1).tolist() == [True, True]
    assert run.metrics["rollout/aborted"] == 1.0


def test_chat_template_wraps_text_and_messages(model, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ {'system': 't50', 'user': 't51', 'assistant': 't52'}[m.role] }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}t52{% endif %}"
    )
    options = {"template": template, "system": "t9"}
    chat = [{"role": "user", "content": "t1"}, {"role": "assistant", "content": "t2"}, {"role": "user", "content": "t3"}]
    batch, _ = collect(model, [*prompts("t1"), Prompt(9, {"prompt": chat})], options=options, group_size=1)
    first, second = (row[: int(n)] for row, n in zip(batch.tokens.tolist(), batch.prompt_lengths, strict=True))
    assert first == [54, 13, 55, 5, 56]
    assert second == [54, 13, 55, 5, 56, 6, 55, 7, 56]
    assert not batch.response_mask[1, : len(second)].any(), "an assistant's turn in the prompt is not trained on (law 9)"
    records = list(batch.records)
    assert records[0]["prompt"] == "t1"
    assert records[1]["messages"] == chat
    assert records[1]["prompt"].split() == ["t50", "t9", "t51", "t1", "t52", "t2", "t51", "t3", "t52"]
    raw, _ = collect(model, prompts("t1"), options={"template": template, "chat": "never"}, group_size=1)
    assert raw.tokens[0, : int(raw.prompt_lengths[0])].tolist() == [5]


def test_last_message_of_the_assistant_is_continued(model, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    chat = [{"role": "user", "content": "t1"}, {"role": "assistant", "content": "t2"}]
    batch, _ = collect(model, [Prompt(0, {"prompt": chat})], options={"template": template}, group_size=1)
    assert batch.tokens[0, : int(batch.prompt_lengths[0])].tolist() == [5, EOS, 6]


def test_overlong_prompt_is_an_error_with_the_arithmetic(model):
    long = " ".join(["t1"] * 13)
    with pytest.raises(DataError, match=r"prompt 1 has 13 tokens, but context 16 - max_new_tokens 4 = 12.*overlong=drop"):
        collect(model, prompts("t1", long))
    collect(model, prompts(" ".join(["t1"] * 12)))


def test_an_overlong_prompt_among_the_first_rows_is_found_before_the_run(model):
    data = [{"prompt": "t1"}, {"prompt": " ".join(["t1"] * 13)}]
    with pytest.raises(DataError, match="prompt 1 has 13 tokens"):
        collect(model, prompts("t1"), data=data)
    collect(model, prompts("t1"), data=data, options={"overlong": "drop"})


def test_overlong_prompts_are_dropped_and_counted(model):
    long = " ".join(["t1"] * 13)
    batch, run = collect(model, prompts("t1", long, "t2"), options={"overlong": "drop"})
    assert batch.group_ids.tolist() == [0, 0, 2, 2]
    assert run.metrics["rollout/overlong"] == 1.0
    nothing, run = collect(model, prompts(long, long), options={"overlong": "drop"})
    assert len(nothing) == 0
    assert run.metrics["rollout/overlong"] == 2.0
    assert Batch.concat([nothing, batch, nothing]).group_ids.tolist() == [0, 0, 2, 2]
    assert len(Batch.concat([nothing, nothing])) == 0


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "t1"}, "no usable `prompt`.*question.*dataset.columns"),
        ({"prompt": 3}, "no usable `prompt`"),
        ({"prompt": []}, "no usable `prompt`"),
        ({"prompt": ""}, "gives 0 tokens"),
    ],
)
def test_rows_without_a_prompt(model, record, words):
    with pytest.raises(DataError, match=words):
        collect(model, [Prompt(4, record)], options={"chat": "never"})


def test_unusable_models_are_one_line(tmp_path):
    with pytest.raises(DataError, match="there is no folder"):
        collect(tmp_path / "nothing", prompts("t1"))
    with pytest.raises(DataError, match=r"holds no config\.json"):
        collect(tmp_path, prompts("t1"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match="no usable tokenizer") as caught:
        collect(tmp_path, prompts("t1"))
    assert "\n" not in str(caught.value)


def test_settings_that_cannot_work(model, tmp_path):
    with pytest.raises(ConfigError, match="leaves no room for a prompt in a context of 16"):
        collect(model, prompts("t1"), max_new_tokens=16)
    with pytest.raises(ConfigError, match="there is no file"):
        collect(model, prompts("t1"), options={"template": tmp_path / "none.jinja"})
    with pytest.raises(ConfigError, match=r"rollout\.system needs a chat template"):
        collect(model, prompts("t1"), options={"chat": "never", "system": "be kind"})
