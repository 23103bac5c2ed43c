import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent


@pytest.fixture
def fake(tmp_path):
    """A run of the fakes with overrides; the folder is the test's own."""
    from jackfield import load_config

    def config(*overrides, folder="run"):
        base = HERE.parent / "core" / "fake.yaml"
        return load_config(base, [f"dir={tmp_path / folder}", "steps=3", "trackers=[]", *overrides])

    return config


@pytest.fixture
def misbehave():
    """Overrides that make rank 1 of the policy go wrong."""

    def overrides(what, name="Misbehaving", **more):
        options = [f"policy.backend.{k}={v}" for k, v in {"what": what, **more}.items()] if name == "Misbehaving" else []
        return [f"policy.backend.name={HERE / 'misbehave.py'}:{name}", *options]

    return overrides


GRPO = """
steps: 3
policy: {model: MODEL, backend: torch, optimizer: {lr: 3e-3, eps: 1e-6, weight_decay: 0.1}, micro_batch_tokens: 48}
engine: hf
algorithm: {name: grpo, kl: {coef: 0.05}}
dataset: copy
rewards: [share, {name: length, target: 4, unit: tokens, weight: 0.5}]
sampling: {max_new_tokens: 8}
batch: {prompts: 5, group_size: 3}
hooks: ["WATCH"]
trackers: []
"""
"""Three steps of a real model with a reference policy; 15 samples do not divide evenly over two ranks. Adam divides a gradient by its own
size, so that an element whose gradient is rounding noise (1e-9) moves in a random direction: hence an eps above that noise."""


PPO = """
steps: 3
policy: {model: MODEL, optimizer: {lr: 3e-3, eps: 1e-6}, micro_batch_tokens: 48}
critic: {optimizer: {lr: 3e-3, eps: 1e-6}, micro_batch_tokens: 48}
algorithm: {name: ppo, kl: {coef: 0.05}}
dataset: copy
rewards: [{name: reward_model, model: JUDGE}]
sampling: {max_new_tokens: 8}
batch: {prompts: 5, group_size: 3}
hooks: ["WATCH"]
trackers: []
"""
"""An actor, a critic, a reference and a reward model."""


def comparing(home, text):
    """`check(name, *overrides)`: the run must have the rewards and metrics of the run in one process and, to 1e-4, its weights.

    Returns the run.
    """
    import torch
    from safetensors.torch import load_file

    from jackfield import Trainer, load_config

    (home / "run.yaml").write_text(text.replace("WATCH", f"{HERE / 'watching.py'}:Watch"))

    def train(name, overrides):
        run = Trainer(load_config(home / "run.yaml", [f"dir={home / name}", *overrides])).train()
        rewards = torch.stack([torch.load(run.dir / f"rewards-{step}.pt") for step in range(3)])
        metrics = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
        files = {folder.name: load_file(folder / "model.safetensors") for folder in sorted(run.dir.glob("out-*"))}
        return run, rewards, {f"{role} {key}": value for role, file in files.items() for key, value in file.items()}, metrics

    _, rewards, weights, metrics = train("local", [])
    before = load_file(home / "model" / "model.safetensors")
    assert len(rewards.unique()) > 3
    assert all((weights[f"out-policy {key}"] - before[key]).abs().max() > 2e-3 for key in before), "what is compared has moved"

    def check(name, *overrides):
        run, *found = train(name, overrides)
        torch.testing.assert_close(found[0], rewards, rtol=1e-5, atol=1e-6)
        assert found[1].keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(found[1][key], value, rtol=0, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
        for mine, other in zip(metrics, found[2], strict=True):
            for key in ("step", "loss", "kl", "grad_norm", "tokens", "rollout_gap/max"):
                assert other[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-5), key
        return run

    return check


@pytest.fixture(scope="session")
def same_run(tmp_path_factory):
    """The GRPO run, to be compared with."""
    from jackfield.testing.models import tiny_model

    home = tmp_path_factory.mktemp("grpo")
    return comparing(home, GRPO.replace("MODEL", str(tiny_model(home / "model"))))


@pytest.fixture(scope="session")
def same_ppo(tmp_path_factory):
    """The PPO run with a critic and a reward model, to be compared with."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    from jackfield.testing.models import tiny_model

    home = tmp_path_factory.mktemp("ppo")
    model = tiny_model(home / "model")
    torch.manual_seed(1)
    LlamaForSequenceClassification(LlamaConfig.from_pretrained(model, num_labels=1)).save_pretrained(home / "judge")
    AutoTokenizer.from_pretrained(model).save_pretrained(home / "judge")
    text = PPO.replace("MODEL", str(model)).replace("JUDGE", str(home / "judge"))
    return comparing(home, text)


SEED = [
    *["launcher.workers=4", "launcher.device=cpu"],
    *["policy.gpus=2", "policy.backend={name: megatron, pp: 2}", "reference.backend={name: megatron, tp: 2}"],
    *["critic.gpus=1", "critic.backend.name=fsdp", "rewards.0.gpus=1"],
]


@pytest.fixture
def seed_case():
    """The case that the project began with, at a quarter of its size: actor on 2 workers, critic (FSDP) on 1, reward model on 1."""
    return SEED


@pytest.fixture
def killed():
    """Overrides that kill -9 a worker of the policy, once, and let the run resume by itself."""
    hooks = ", ".join(f"'{HERE / 'watching.py'}:{name}'" for name in ("Watch", "Killer"))
    return [f"hooks=[{hooks}]", "checkpoint.every=1", "checkpoint.max_restarts=1"]
