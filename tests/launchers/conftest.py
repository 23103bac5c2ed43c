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
trackers: []
"""
"""Three steps of a real model with a reference policy; 15 samples do not divide evenly over two ranks. Adam divides a gradient by its own
size, so that an element whose gradient is rounding noise (1e-9) moves in a random direction: hence an eps above that noise."""


@pytest.fixture(scope="session")
def same_run(tmp_path_factory):
    """`same_run(name, *overrides)`: the GRPO run must have the rewards and metrics of the run in one process and, to 1e-4, its weights."""
    import torch
    from safetensors.torch import load_file

    from jackfield import Trainer, hookimpl, load_config
    from jackfield.testing.models import tiny_model

    home = tmp_path_factory.mktemp("same")
    before = load_file(tiny_model(home / "model") / "model.safetensors")
    (home / "grpo.yaml").write_text(GRPO.replace("MODEL", str(home / "model")))

    class Watch:
        def __init__(self):
            self.rewards, self.metrics = [], []

        @hookimpl(wrapper=True, trylast=True)
        def advantage(self, run, batch):
            self.rewards.append(batch.rewards[batch.sample_ids.argsort()])
            return (yield)

        @hookimpl
        def step_end(self, run, metrics):
            self.metrics.append({name: metrics[name] for name in ("loss", "kl", "grad_norm", "tokens", "rollout_gap/max")})

        @hookimpl
        def run_end(self, run):
            (run.dir / "out").mkdir()
            run.policy.export(run.dir / "out")

    def train(name, overrides):
        trainer = Trainer(load_config(home / "grpo.yaml", [f"dir={home / name}", *overrides]))
        watch = Watch()
        trainer.run.manager.register(watch, "watch")
        run = trainer.train()
        return run, torch.stack(watch.rewards), load_file(run.dir / "out" / "model.safetensors"), watch.metrics

    _, rewards, weights, metrics = train("local", [])
    assert len(rewards.unique()) > 3
    assert all((weights[name] - before[name]).abs().max() > 2e-3 for name in before), "what is compared has moved by 20 tolerances"

    def check(name, *overrides):
        run, *found = train(name, overrides)
        assert torch.equal(found[0], rewards)
        assert found[1].keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(found[1][key], value, rtol=0, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
        for mine, other in zip(metrics, found[2], strict=True):
            assert other == pytest.approx(mine, rel=1e-3, abs=1e-5)
        return run

    return check
