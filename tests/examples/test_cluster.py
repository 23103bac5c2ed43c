"""examples/cluster: what Slurm and KubeRay are told is well-formed, and its config fits on the GPUs that they are asked for."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jackfield import load_config, registry
from jackfield_check.command import command

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
SCRIPT = FOLDER / "slurm.sbatch"
QWEN = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
"""The shape of the 7B model that the config names."""


def directives():
    """What #SBATCH lines say; Slurm stops reading them at the first command."""
    head = re.split(r"^[^#\n]", SCRIPT.read_text(), maxsplit=1, flags=re.M)[0]
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", head, re.M))


@pytest.fixture
def slurm(tmp_path):
    """Runs the script on a Slurm of shell functions on two nodes; what Ray is asked to do comes back as words."""
    commands = {
        "scontrol": '[ "$*" = "show hostnames gpu[7-8]" ] && printf "gpu7\\ngpu8\\n"',
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "ray": 'printf "%q " "$@"',
    }
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"PATH={tmp_path}:$PATH\n")
    jobs = {"SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_JOB_NUM_NODES": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*arguments):
        done = subprocess.run(["bash", SCRIPT, *arguments], cwd=tmp_path, env=jobs, capture_output=True, text=True, check=True)
        return shlex.split(done.stdout)

    return run


def test_the_script_is_bash_and_asks_slurm_for_whole_nodes():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    found = directives()
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("2", "1", "8")
    assert {"exclusive", "time", "requeue"} <= set(found)
    assert len(found) == SCRIPT.read_text().count("#SBATCH "), "a directive is malformed, or after the first command"


@pytest.mark.parametrize("arguments", [(), ("my.yaml", "steps=3", "dataset.path=my data")])
def test_ray_is_started_on_all_nodes_and_trains_once(slurm, arguments):
    config, *overrides = arguments or ("examples/cluster/grpo.yaml",)
    start = ["symmetric-run", "--address", "gpu7:6379", "--min-nodes", "2", "--"]
    assert slurm(*arguments) == [*start, "jackfield", "train", config, "launcher.name=ray", "launcher.address=auto", *overrides]


def test_the_ray_job_has_what_kuberay_requires():
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    shell, flag, line = shlex.split(spec["entrypoint"])
    assert (shell, flag) == ("bash", "-c") and line.endswith("&& jackfield train grpo.yaml")
    cluster = spec["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-gpus": "0"}, "no worker may land beside the controller"
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"] == 2
    for group in (head, workers):
        assert all(isinstance(v, str) for v in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] and container["image"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]} == {"shared", "shm"}
        assert line.startswith(f"cd {container['volumeMounts'][0]['mountPath']} &&")
    asked = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(asked) * workers["replicas"] == int(directives()["nodes"]) * int(directives()["gpus-per-node"]) == 16


def test_the_config_passes_jackfield_check(tmp_path):
    """Every plugin takes the options that it is given, and a GPU of 80 GiB suffices."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    arguments = [str(FOLDER / "grpo.yaml"), f"policy.model={tmp_path}", "--gpus", "16", "--gpu-memory", "80"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == "launcher ray: 16 of 16 workers in 1 pool"
    assert lines[-1].startswith("fits: ")
    config = load_config(FOLDER / "grpo.yaml")
    chosen = {"launcher": config.launcher, "dataset": config.dataset, "algorithm": config.algorithm}
    for kind, spec in {**chosen, "backend": config.policy.backend, "reward": config.rewards[0]}.items():
        registry.load(kind, spec.name).Config(**spec.options)
