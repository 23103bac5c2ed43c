"""The migration pages name settings that exist, and what they show works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jackfield import registry
from jackfield.config import load_config
from jackfield.testing.runs import fake_run

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["coming-from-trl.md", "coming-from-verl.md"]


def missing(paths: list[str]) -> list[str]:
    """Those of the dotted settings that no config and no plugin has; asked in a process of its own, since it imports every plugin."""
    script = Path(__file__).with_name("settings.py")
    done = subprocess.run([sys.executable, script], input=json.dumps(paths), capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cells(page: str) -> list[str]:
    """Backticked words of the right-hand columns of the tables of settings."""
    text = (DOCS / page).read_text()
    rows = [line for line in text[text.index("Where ") :].splitlines() if line.startswith(("| `", "| DeepSpeed"))]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.rstrip(" |").rpartition(" | ")[2])]


@pytest.mark.slow
def test_every_setting_named_exists():
    paths = [w.partition(":")[0] for page in PAGES for w in cells(page) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+(: .*)?", w)]
    assert len(paths) > 120
    wrong = ["policy.backend.ttp", "algorithm.kl.coefficient", "bacth.prompts"]
    assert missing([*paths, *wrong]) == wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_plugin_named_exists(page):
    for kind, listed in re.findall(r"`(algorithm|engine|launcher|trackers)`: ([^|;]*)", (DOCS / page).read_text()):
        chosen = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)| with .*| or `kl`", "", listed))
        assert chosen
        assert set(chosen) <= {entry.name for entry in registry.entries(kind.removesuffix("s"))}, f"{kind}: {chosen}"


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
    sampling = {"max_new_tokens": 4}
    run = fake_run(tmp_path / "run", hooks=[f"{tmp_path}/mask.py:MaskTruncated"], sampling=sampling, steps=2)
    assert len(run.batches) == 2
    for batch in run.batches:
        truncated = batch.finish_reasons == 1
        assert 0 < truncated.sum() < len(batch)
        assert batch.loss_mask.any(-1).tolist() == (~truncated).tolist()
