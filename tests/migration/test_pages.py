"""The migration pages name settings that exist, and what they show works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from jackfield import registry
from jackfield.config import RunConfig, load_config
from jackfield.errors import PluginError
from jackfield.testing.runs import fake_run

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["coming-from-trl.md", "coming-from-verl.md"]
KINDS = {"backend": "backend", "engine": "engine", "rollout": "rollout", "algorithm": "algorithm", "rewards": "reward"}
KINDS |= {"dataset": "dataset", "launcher": "launcher", "transport": "transport", "trackers": "tracker", "hooks": "hooks"}


def configs(kind: str) -> list[type[BaseModel]]:
    """The settings of every installed plugin of a kind."""
    found = []
    for entry in registry.entries(kind):
        try:
            config = getattr(registry.load(kind, f"{entry.distribution}/{entry.name}"), "Config", None)
        except PluginError:
            continue
        found += [config] if config is not None else []
    return found


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def exists(path: str) -> bool:
    """Whether `a.b.c` is a field of a run's config, or of some plugin that can stand there."""
    models: list[type[BaseModel]] = [RunConfig]
    for name in path.split("."):
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return False
        models = [inner for field in fields for inner in models_in(field.annotation)] + (configs(KINDS[name]) if name in KINDS else [])
    return True


def cells(page: str) -> list[str]:
    """Backticked words of the right-hand columns of the tables of settings."""
    text = (DOCS / page).read_text()
    rows = [line for line in text[text.index("Where ") :].splitlines() if line.startswith(("| `", "| DeepSpeed"))]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.rstrip(" |").rpartition(" | ")[2])]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_setting_named_exists(page):
    words = cells(page)
    paths = [w.partition(":")[0] for w in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+(: .*)?", w)]
    assert len(paths) > 40
    assert [path for path in paths if not exists(path)] == []
    for kind, listed in re.findall(r"`(algorithm|engine|launcher|trackers)`: ([^|;]*)", (DOCS / page).read_text()):
        chosen = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)| with .*| or `kl`", "", listed))
        assert set(chosen) <= {entry.name for entry in registry.entries(KINDS.get(kind, kind))}, f"{kind}: {chosen}"


def test_a_setting_that_does_not_exist_is_seen():
    assert exists("policy.backend.tp")
    assert exists("algorithm.kl.coef")
    assert not exists("policy.backend.ttp")
    assert not exists("algorithm.kl.coefficient")


def test_the_trl_config_is_valid(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "coming-from-trl.md").read_text(), re.DOTALL)
    (tmp_path / "run.yaml").write_text(example)
    config = load_config(tmp_path / "run.yaml")
    assert [spec.label for spec in config.rewards] == ["accuracy_reward", "format_reward"]
    for kind, spec in (("algorithm", config.algorithm), ("backend", config.policy.backend), ("reward", config.rewards[1])):
        registry.load(kind, spec.name).Config(**spec.options)


def test_truncated_samples_are_masked_by_the_plugin_shown(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "coming-from-trl.md").read_text(), re.DOTALL)
    (tmp_path / "mask.py").write_text(code)
    kept = []

    class Keeps:
        from jackfield import hookimpl

        @hookimpl(wrapper=True)
        def update(self, run, batch):
            kept.append(batch)
            return (yield)

    sampling = {"max_new_tokens": 4}
    fake_run(tmp_path / "run", plugins=[Keeps()], hooks=[f"{tmp_path}/mask.py:MaskTruncated"], sampling=sampling, steps=2)
    for batch in kept:
        truncated = batch.finish_reasons == 1
        assert 0 < truncated.sum() < len(batch)
        assert batch.loss_mask.any(-1).tolist() == (~truncated).tolist()
