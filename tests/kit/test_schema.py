"""The JSON schema for editors accepts what jackfield accepts, and marks what it refuses."""

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from jackfield.cli import app
from jackfield.config import load_raw
from jackfield_commands.schema import schema

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [p for p in [*ROOT.glob("examples/**/*.yaml"), ROOT / "tests" / "core" / "fake.yaml"] if "policy:" in p.read_text()]


def problems(given: dict, against: dict) -> list[str]:
    validator = jsonschema.Draft202012Validator(against)
    validator.check_schema(against)
    return [f"{list(e.absolute_path)}: {e.message}" for e in validator.iter_errors(given)]


def quickstart(**changes) -> dict:
    return load_raw(ROOT / "examples" / "quickstart.yaml") | changes


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_valid(path):
    assert problems(load_raw(path), schema()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "grpo", "clip_low": 0.1}},
        {"algorithm": "mine.py:Mine"},
        {
            "policy": {
                "model": "path",
                "backend": {"name": "fsdp", "dtype": "bfloat16"},
                "optimizer": {"lr": {"start": 1, "end": 0, "steps": 3}},
            }
        },
        {"engine": {"name": "vllm", "gpus": 2, "tp": 2}, "hooks": [{"name": "offpolicy", "upper": 3.0}]},
        {"rewards": ["exact", {"name": "mine.py:fn", "weight": 2.0, "timeout": 3}]},
    ],
)
def test_every_way_of_writing_a_choice_is_valid(changes):
    assert problems(quickstart(**changes), schema()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"bacth": {}},
        {"batch": {"promts": 2}},
        {"batch": {"prompts": "two"}},
        {"algorithm": 3},
        {"algorithm": {"clip_low": 0.1}},
        {"rewards": "exact"},
        {"sampling": {"top_p": 2.0}},
    ],
)
def test_mistakes_are_marked(changes):
    assert problems(quickstart(**changes), schema()) != []


def test_with_a_config_its_plugins_settings_are_known():
    result = CliRunner().invoke(app, ["config", str(ROOT / "examples" / "quickstart.yaml"), "--schema"], catch_exceptions=False)
    found = json.loads(result.output)
    assert problems(quickstart(algorithm={"name": "grpo", "clip_low": 0.1, "kl": {"coef": 0.1}}), found) == []
    assert problems(quickstart(algorithm={"name": "grpo", "clip_lo": 0.1}), found) != []
    assert problems(quickstart(algorithm={"name": "grpo", "kl": {"coefficient": 0.1}}), found) != []
    assert problems(quickstart(algorithm={"name": "rloo", "anything": 1}), found) == [], "what the config does not name is left alone"
    assert "Dual" not in json.dumps(schema()["properties"]["algorithm"]), "without a config nothing is imported"
