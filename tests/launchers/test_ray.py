"""Launcher `ray` on two simulated nodes of this host: the roles of a run on different nodes, and workers that go wrong."""

import importlib.util

import pytest
import torch

from jackfield import Trainer
from jackfield.errors import ConfigError, PluginError, WorkerError
from jackfield.testing.models import tiny_model

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, `left` with 3 CPUs and `right` with 2; memory as small as Ray allows."""
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "resources": {"left": 10}, **small})
    cluster.add_node(num_cpus=2, resources={"right": 10}, object_store_memory=80 << 20)
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


RAY = ["launcher.name=ray", "launcher.device=cpu", "launcher.cpus=1", "launcher.address=auto"]
RAY2 = [*RAY, "launcher.workers=2"]


def table(config, role="policy"):
    return torch.load(config.dir / "checkpoints" / "step-00000003" / role / "table.pt")["table"]


APART = ["reference.colocate=share", "rewards.0.gpus=1", "launcher.resources={policy: {left: 1}, share: {right: 1}}", "launcher.workers=3"]
MEGATRON = [pytest.mark.megatron, pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")]


@pytest.mark.parametrize(
    ("workers", "overrides"),
    [
        pytest.param([1], ["launcher.workers=1"], id="one"),
        pytest.param([1, 1], ["launcher.workers=2", "launcher.strategy=STRICT_SPREAD"], id="dp2"),
        pytest.param([2, 1], ["policy.backend.name=fsdp", "reference.backend.name=torch", *APART], id="fsdp2"),
        pytest.param([2, 1], ["policy.backend={name: megatron, tp: 2}", "reference.backend.name=torch", *APART], id="tp2", marks=MEGATRON),
    ],
)
def test_grpo_is_the_run_of_one_process(same_run, cluster, workers, overrides, request):
    """DP over both nodes; FSDP and TP on two workers of one, with the reference and a reward on the other."""
    run = same_run(request.node.callspec.id, *RAY, *overrides)
    places = [w.place.node for w in {*run.policy.group.workers, *run.reference.group.workers}]
    assert sorted((places.count(node) for node in set(places)), reverse=True) == workers


def test_roles_on_two_nodes_give_the_run_of_one_process(fake, cluster):
    """Actor on 2 workers of one node; critic, reward model and engine on the other (the seed's case at 1/4 scale)."""
    ppo = ["algorithm.name=ppo", "algorithm.kl.coef=0.01", "critic.optimizer.lr=0.5"]
    together = fake(*ppo, folder="together")
    Trainer(together).train()
    nodes = "{policy: {left: 1}, critic: {right: 1}, FakeReward: {right: 1}, engine: {left: 1}}"
    apart = fake(
        *[*ppo, *RAY, "launcher.workers=5", f"launcher.resources={nodes}"],
        *["policy.gpus=2", "critic.gpus=1", "engine.name=jackfield.testing.fakes:FakeEngine", "engine.gpus=1"],
        "rewards=[{name: 'jackfield.testing.fakes:FakeReward', gpus: 1}]",
        folder="apart",
    )
    run = Trainer(apart).train()
    for role in ("policy", "critic"):
        torch.testing.assert_close(table(apart, role), table(together, role), rtol=1e-5, atol=1e-7)
    where = {w.name: w.place.node for w in run.policy.link.workers + run.critic.group.workers}
    assert len(where) == 4 and where["policy worker 0 of 2"] == where["policy worker 1 of 2"] != where["critic worker 0 of 1"]
    assert run.metrics["sync/bytes_sent"] > 0


def test_an_exception_arrives_with_rank_traceback_and_quiet_logs(fake, misbehave, cluster, capfd):
    with pytest.raises(WorkerError, match="policy worker 1 of 2 raised ValueError in update: the sky is falling; ") as found:
        Trainer(fake(*RAY2, *misbehave("raise"))).train()
    assert "\n" not in str(found.value) and "misbehave.py" in found.value.__notes__[0]
    out, err = capfd.readouterr()
    assert out == "" and err == "", "workers write into their own logs"


def test_a_worker_killed_in_mid_rollout_is_named_and_the_run_resumes_to_the_same_weights(same_run, killed, cluster, capfd):
    """kill -9 from outside; law 22, with a sharded backend over both nodes."""
    spread = ["policy.backend.name=fsdp", "launcher.strategy=STRICT_SPREAD"]
    run = same_run("killed", *RAY2, *spread, *killed)
    seconds, _, error = (run.dir / "noticed").read_text().partition(" ")
    assert float(seconds) < 60, "law 22's own bound"
    assert error.startswith("policy worker 1 of 2 (pid") and "by signal 9" in error
    assert "resuming by itself" in capfd.readouterr().err


@MEGATRON[0]
@MEGATRON[1]
def test_the_seeds_case_at_quarter_scale_on_two_nodes(same_ppo, seed_case, cluster):
    """The actor's two workers on one node, critic and reward model on the other."""
    nodes = "launcher.resources={policy: {left: 1}, critic: {right: 1}, reward_model: {right: 1}}"
    run = same_ppo("apart", *RAY, *seed_case, nodes)
    actor, critic = ({w.place.node for w in role.group.workers} for role in (run.policy, run.critic))
    assert len(actor) == len(critic) == 1 and actor != critic


def test_streams(fake, cluster):
    from jackfield.components import Request
    from jackfield.config import SamplingConfig
    from jackfield_ray.launcher import RayLauncher

    launcher = RayLauncher(RayLauncher.Config(workers=2, device="cpu", cpus=1, address="auto"))
    try:
        group = launcher.start(fake(), ["policy"])["policy"]
        group.call("setup", "policy")
        group.call("setup_engine")
        group.call("sync", 0)
        request = Request(0, (2, 3), tuple(range(700)), SamplingConfig(max_new_tokens=8, ignore_eos=True))
        stream = group.stream("generate", [[request], [request]])
        assert len(next(stream).tokens) == 8
        stream.close()
        assert sum(1 for _ in group.stream("generate", [[request], []])) == 700
        half = group.stream("generate", [[request], []])
        next(half)
        assert len(group.call("sync", 1)) == 2
        assert sum(1 for _ in half) == 699
        with pytest.raises(WorkerError, match=r"policy worker \d of 2 raised AttributeError in generate"):
            list(group.stream("generate", [[None], [None]]))
    finally:
        launcher.stop()


def test_a_plugin_that_differs_is_named_before_the_first_step(fake, cluster, monkeypatch):
    from jackfield_ray import launcher

    real = launcher.fingerprint
    monkeypatch.setattr(launcher, "fingerprint", lambda c: tuple((n, "0.0.9" if n == "jackfield" else v) for n, v in real(c)))
    with pytest.raises(
        PluginError, match=r"policy worker \d of 2 \(pid \d+ on .*\): .*resolves jackfield to '.*', the controller to '0\.0\.9'"
    ):
        Trainer(fake(*RAY2)).train()


def test_what_does_not_fit_is_said_with_arithmetic(fake, cluster):
    with pytest.raises(ConfigError, match=r"policy needs 2 workers with CPU 8 in all \(PACK\), but after 1 s only CPU 5 are free"):
        Trainer(fake(*RAY2, "launcher.cpus=4", "launcher.start_seconds=1")).train()
    with pytest.raises(ConfigError, match="none of the 2 nodes offers a GPU: set device to 'cpu'"):
        Trainer(fake(*RAY2, "launcher.device=cuda")).train()


def test_a_missing_extra_on_a_node_is_named_before_the_first_step(fake, cluster, tmp_path):
    """PEFT is installed here, but not on the node that the policy is placed on."""
    (tmp_path / "without" / "peft").mkdir(parents=True)
    (tmp_path / "without" / "peft" / "__init__.py").write_text("raise ImportError('No module named peft')\n")
    bare = {"num_cpus": 1, "resources": {"bare": 1}, "object_store_memory": 80 << 20}
    node = cluster.add_node(**bare, env_vars={"PYTHONPATH": str(tmp_path / "without")})
    try:
        model = f"policy.model={tiny_model(tmp_path / 'model')}"
        place = ["launcher.workers=1", "launcher.resources={policy: {bare: 1}}"]
        with pytest.raises(PluginError, match=r"policy worker 0 of 1.*: backend: lora needs PEFT; pip install 'jackfield\[lora\]'"):
            Trainer(fake(*RAY, *place, model, "policy.backend={name: torch, lora: {r: 4}}")).train()
    finally:
        cluster.remove_node(node)
