"""Rollout `multi_turn`: an environment answers between calls of the engine; what it says is seen but not trained on."""

from __future__ import annotations

import textwrap

import pytest
from rollout_helpers import RulePolicy, make_run

from jackfield.batch import Prompt
from jackfield.errors import ConfigError, PluginError
from jackfield.testing.models import EOS, tiny_model
from jackfield_rollout.multi_turn import MultiTurn

GAME = """
    class Game:
        '''Ends when told t9; raises on t8; otherwise says t20 and the number of the turn.'''
        def __init__(self, bonus=0):
            self.bonus = bonus
        def reset(self, record):
            if record.get("broken"):
                raise RuntimeError("no game today")
            self.record, self.turns = record, 0
        def step(self, text):
            self.turns += 1
            self.record["points"] = self.turns + self.bonus
            if "t8" in text:
                raise ValueError("I dislike t8")
            return f"t20 t{20 + self.turns}", "t9" in text

    class Half:
        def reset(self, record): ...
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), max_positions=24)


@pytest.fixture
def game(tmp_path):
    (tmp_path / "game.py").write_text(textwrap.dedent(GAME))
    return str(tmp_path / "game.py")


def collect(model, game, rows, answer, *, options=None, name="Game", **run):
    rollout = MultiTurn(MultiTurn.Config(environment=f"{game}:{name}", **{"chat": "never", **(options or {})}))
    run = make_run(model, RulePolicy(answer, shuffle=1), **run)
    rollout.configure(run)
    return rollout.rollout(run, rows), run


def say(*turns):
    """Answer by turn, told from the request's length history: the first tokens are the prompt's, then [answer, EOS, t20, tN] a turn."""

    def answer(request, index):
        done = sum(1 for t in request.tokens if t == 24)  # t20 has id 24: one for each turn of the environment
        return [turns[min(done, len(turns) - 1)] + 4, EOS], "stop"

    return answer


def rows(*texts, **fields):
    return [Prompt(k, {"prompt": t, **fields}) for k, t in enumerate(texts)]


def test_tool_output_is_in_the_sequence_but_not_sampled(model, game):
    batch, run = collect(model, game, rows("t1"), say(5, 9), options={"options": {"bonus": 10}})
    assert batch.tokens.tolist() == [[5, 9, EOS, 24, 25, 13, EOS]] * 2
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 0, 0, 1, 1]] * 2
    assert batch.rollout_log_probs[0].tolist() == [0, -0.5, -1.5, 0, 0, -0.5, -1.5]
    assert batch.versions[0].tolist() == [-1, 7, 7, -1, -1, 7, 7]
    record = batch.records[0]
    assert (record["turns"], record["response"], record["points"], record["finish_reason"]) == (["t5", "t9"], "t9", 12, "stop")
    assert run.metrics["rollout/turns"] == 4.0


def test_each_sample_has_its_own_length_environment_and_seeds(model, game):
    def answer(request, index):
        done = sum(t == 24 for t in request.tokens)
        return [9 + 4 if done >= request.tokens[0] - 5 else 4 + 4, EOS], "stop"

    texts = ["t1", "t2", "t3"]

    def quiet(request, index):
        tokens, reason = answer(request, index)
        return [t if t != 8 else 9 for t in tokens], reason  # t5, not the t8 that the game dislikes

    batch, run = collect(model, game, rows(*texts), quiet, group_size=1, options={"max_turns": 5})
    assert [len(r["turns"]) for r in batch.records] == [1, 2, 3]
    assert [r["points"] for r in batch.records] == [1, 2, 3]
    assert batch.group_ids.tolist() == [0, 1, 2]
    seeds = [r.seeds for call in run.policy.calls for r in call]
    assert len(run.policy.calls) == 3
    assert len(set(seeds)) == 6, "every turn of every sample draws anew"


def test_turn_and_context_limits(model, game):
    batch, _ = collect(model, game, rows("t1"), say(5), options={"max_turns": 3}, group_size=1)
    assert (len(batch.records[0]["turns"]), batch.finish_reasons.tolist()) == (3, [0])
    assert batch.response_mask[0, -1], "nothing is appended after the last turn"
    batch, _ = collect(model, game, rows("t1"), say(5), options={"max_turns": 30}, group_size=1)
    assert batch.finish_reasons.tolist() == [1]
    assert batch.tokens.shape[1] <= 24


def test_environment_that_raises_costs_its_own_sample(model, game):
    def answer(request, index):
        return [8 + 4 if request.tokens[0] == 5 else 9 + 4, EOS], "stop"

    batch, run = collect(model, game, rows("t1", "t2"), answer, group_size=1)
    assert batch.loss_mask.any(-1).tolist() == [False, True]
    assert run.metrics["rollout/environment_failed"] == 1.0
    assert run.metrics["rollout/aborted"] == 1.0
    with pytest.raises(PluginError, match=r"game\.py:Game.* raised in all 2 samples of step 5") as caught:
        collect(model, game, rows("t1", "t2", broken=True), answer, group_size=1)
    assert "no game today" in str(caught.value)


def test_chat_template_puts_the_observation_into_a_turn_of_its_own(model, game, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ {'user': 't51', 'assistant': 't52'}[m.role] }} {{ m.content }} <eos> t40 {% endfor %}"
        "{% if add_generation_prompt %}t52{% endif %}"
    )
    batch, _ = collect(model, game, rows("t1"), say(5, 9), options={"chat": "auto", "template": template}, group_size=1)
    words = [55, 5, EOS, 44, 56, 9, EOS, 44, 55, 24, 25, EOS, 44, 56, 13, EOS]
    assert batch.tokens[0].tolist() == words
    assert batch.response_mask[0].int().tolist() == [0] * 5 + [1, 1] + [0] * 7 + [1, 1]


def test_environments_that_cannot_be_used(model, game):
    for name, words in {"Half": "lacks step", "Missing": "cannot be imported: AttributeError"}.items():
        with pytest.raises(ConfigError, match=words):
            collect(model, game, rows("t1"), say(9), name=name)
    with pytest.raises(ConfigError, match="there is no file"):
        collect(model, "nowhere.py", rows("t1"), say(9))
