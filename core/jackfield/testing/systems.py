"""Conformance of launchers, transports and hook plugins: subclass, name yours, and get the laws as tests (docs/laws.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from jackfield.components import Backend, BackendConfig, Engine, Position, Request, Transport, WorkerContext
from jackfield.hookspecs import hookimpl
from jackfield.shard import Shard
from jackfield.testing.parts import build
from jackfield.testing.runs import fake_config, fake_run
from jackfield.trainer import Trainer


class LauncherConformance:
    """Set `launcher` (a name as in a config) and `config`; `workers` is how many it starts with that config for one role."""

    launcher: str
    config: dict[str, Any] = {}
    workers = 1

    def test_results_come_by_rank(self, tmp_path: Path) -> None:
        """`call` and `scatter` return one result a rank, in order; `stream` yields every item once; `stop` can be called twice."""
        config = fake_config(tmp_path / "run", launcher={"name": self.launcher, **self.config})
        launcher = build("launcher", self.launcher, self.config)
        try:
            group = launcher.start(config, ["policy"])["policy"]
            assert group.size == self.workers, f"the launcher started {group.size} workers, the test expects {self.workers}"
            positions = group.call("setup", "policy")
            assert [p.dp_rank for p in positions] == list(range(self.workers)), f"law 20: results are not by rank: {positions}"
            assert all(isinstance(p, Position) for p in positions)
            group.call("setup_engine")
            group.call("sync", 0)
            requests = [Request(i, (2,), (i, 100 + i), config.sampling) for i in range(2 * self.workers)]
            found = list(group.stream("generate", [requests[r :: self.workers] for r in range(self.workers)]))
            keys = sorted((s.request_id, s.index) for s in found)
            assert keys == [(r.id, k) for r in requests for k in (0, 1)], f"law 18: samples lost or doubled on the way: {keys}"
        finally:
            launcher.stop()
            launcher.stop()

    def test_law_1_the_trajectory_is_that_of_one_worker(self, tmp_path: Path) -> None:
        """Where work is done does not change what is learnt."""
        alone = fake_run(tmp_path / "alone", steps=3)
        spread = fake_run(tmp_path / "spread", steps=3, launcher={"name": self.launcher, **self.config})
        assert spread.sample_ids == alone.sample_ids, "law 18: the launcher changed which samples are trained on"
        for step, (a, b) in enumerate(zip(alone.metrics, spread.metrics, strict=True)):
            for name in ("reward", "loss", "grad_norm"):
                assert abs(a[name] - b[name]) <= 1e-5 * max(1.0, abs(a[name])), (
                    f"law 1: {name} of step {step} is {b[name]}, alone {a[name]}"
                )

    def test_law_29_resume(self, tmp_path: Path) -> None:
        """Checkpoints go through the workers and come back."""
        spec = {"name": self.launcher, **self.config}
        straight = fake_run(tmp_path / "straight", steps=4, launcher=spec)
        fake_run(tmp_path / "halves", steps=2, launcher=spec)
        second = fake_run(tmp_path / "halves", steps=4, launcher=spec)
        assert second.sample_ids == straight.sample_ids[2:], "law 29: the resumed run trains on other samples"
        assert second.metrics[-1]["grad_norm"] == straight.metrics[-1]["grad_norm"], "law 29: the resumed run computes other gradients"


class _Source(Backend):
    """Three weights and a persistent buffer; `perturb` changes each a little."""

    Config = BackendConfig
    shapes = {"embed.weight": (8, 4), "layer.weight": (4, 6), "layer.bias": (6,), "router.expert_bias": (3,)}

    def setup(self, model: Any, optimizer: Any, context: WorkerContext) -> None:
        rng = torch.Generator().manual_seed(context.seed)
        self.tensors = {n: torch.randn(s, generator=rng) for n, s in self.shapes.items()}
        self.tensors["layer.weight"] = self.tensors["layer.weight"].t().contiguous().t()

    def perturb(self) -> None:
        """What an optimizer step does."""
        for tensor in self.tensors.values():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)))

    def shards(self) -> list[Shard]:
        return _shards(self.tensors)

    def adopt(self, shards: Sequence[Shard]) -> bool:
        for shard in shards:
            if shard.tensor is None or shard.size != tuple(self.tensors[shard.name].shape):
                return False
        for shard in shards:
            assert shard.tensor is not None
            shard.tensor.copy_(self.tensors[shard.name])
            self.tensors[shard.name] = shard.tensor
        return True

    position = Position()
    forward = forward_backward = optimizer_step = zero_grad = save = load = export = None  # type: ignore[assignment]


class _Destination(Engine):
    """Holds its own copies, wrong ones at first; counts the calls that drop caches."""

    adopts = False

    def setup(self, model: Any, context: WorkerContext) -> None:
        self.tensors = {n: torch.full(s, float("nan")) for n, s in _Source.shapes.items()}
        self.dropped: list[int] = []

    def shards(self) -> list[Shard]:
        return _shards(self.tensors)

    def adopt(self, shards: Sequence[Shard]) -> bool:
        if self.adopts:
            self.tensors = {s.name: s.tensor for s in shards if s.tensor is not None}
        return self.adopts

    def weights_updated(self, version: int) -> None:
        self.version = version
        self.dropped.append(version)

    generate = None  # type: ignore[assignment]


def _shards(tensors: dict[str, torch.Tensor]) -> list[Shard]:
    rows = [(n, tuple(t.shape), t) for n, t in tensors.items()]
    return [Shard(n, s, (0,) * len(s), s, str(t.dtype).removeprefix("torch."), t, n == "router.expert_bias") for n, s, t in rows]


class TransportConformance:
    """Laws 23, 24 and 26 within one process. Set `transport` (a name or class); `shares` if it can only share storage."""

    transport: Any
    config: dict[str, Any] = {}
    shares = False

    def connected(self) -> tuple[Transport, Any, Any]:
        """The transport between a source and a destination whose weights are NaN."""
        context = WorkerContext("policy", torch.device("cpu"), 0)
        source, destination = _Source(), _Destination()
        destination.adopts = self.shares
        source.setup(None, None, context)
        destination.setup(None, context)
        transport = build("transport", self.transport, self.config)
        transport.connect(source, destination, context)
        return transport, source, destination

    def _equal(self, source: Any, destination: Any, when: str) -> None:
        for name, tensor in source.tensors.items():
            law = "law 24 (buffers)" if name == "router.expert_bias" else "law 23"
            assert torch.equal(tensor, destination.tensors[name]), f"{law}: {name} differs between trainer and engine {when}"

    def test_law_23_every_sync_is_complete(self) -> None:
        """Bit for bit, after the first sync and after each update."""
        transport, source, destination = self.connected()
        transport.sync(1)
        self._equal(source, destination, "after the first sync")
        for version in (2, 3):
            source.perturb()
            transport.sync(version)
            self._equal(source, destination, f"after sync {version}")

    def test_law_23_a_sync_leaves_the_trainer_alone(self) -> None:
        """The trainer's values are the same before and after."""
        transport, source, _ = self.connected()
        before = {n: t.clone() for n, t in source.tensors.items()}
        transport.sync(1)
        changed = [n for n, t in source.tensors.items() if not torch.equal(t, before[n])]
        assert not changed, f"law 23: the sync changed the trainer's {changed}"

    def test_law_26_caches_are_dropped_with_every_version(self) -> None:
        """`weights_updated(version)` once a sync, after the weights are there."""
        transport, _, destination = self.connected()
        transport.sync(4)
        transport.sync(5)
        assert destination.dropped[-2:] == [4, 5], f"law 26: weights_updated was called with {destination.dropped}, not with 4 and 5"
        assert destination.version == 5

    def test_the_report_accounts_for_every_byte(self) -> None:
        """Aliased, copied and sent bytes add up to what the engine holds."""
        transport, _, destination = self.connected()
        report = transport.sync(1)
        total = sum(t.nbytes for t in destination.tensors.values())
        told = report.bytes_aliased + report.bytes_copied + report.bytes_sent
        assert report.version == 1, f"the report says version {report.version}, the sync was for 1"
        assert told == total, f"the report accounts for {told} bytes, the engine holds {total}"


class HooksConformance:
    """What any hook plugin must keep. Set `plugin` (a name or class), `config`, and `changes_training` if that is what it is for."""

    plugin: Any
    config: dict[str, Any] = {}
    changes_training = False

    def make(self) -> Any:
        """A fresh plugin."""
        return build("hooks", self.plugin, self.config)

    def test_registers_and_trains(self, tmp_path: Path) -> None:
        """Its hooks exist, with their own signatures."""
        done = fake_run(tmp_path / "run", plugins=[self.make()])
        assert done.run.step == 3
        assert done.run.manager.get_hookcallers(done.run.manager.get_plugins().pop()) is not None

    def test_law_6_leaves_nothing_behind(self, tmp_path: Path) -> None:
        """A run without it, after one with it in the same process, is bit-identical to one before."""
        before = fake_run(tmp_path / "before")
        with_plugin = fake_run(tmp_path / "with", plugins=[self.make()])
        after = fake_run(tmp_path / "after")
        assert after.same_training(before), "design law 6: the plugin has an effect on a run that does not name it"
        assert after.metrics == before.metrics, "design law 6: the plugin has an effect on the metrics of a run that does not name it"
        if not self.changes_training:
            assert with_plugin.same_training(before), "the plugin changes the training; if that is its purpose, say changes_training = True"

    def test_law_29_resume(self, tmp_path: Path) -> None:
        """Six steps, and three with three more after a restart, are the same."""
        straight = fake_run(tmp_path / "straight", plugins=[self.make()], steps=6)
        fake_run(tmp_path / "halves", plugins=[self.make()], steps=3)
        second = fake_run(tmp_path / "halves", plugins=[self.make()], steps=6)
        assert second.sample_ids == straight.sample_ids[3:], "law 29: after a resume other samples are trained on: save your state"
        assert all(torch.equal(w, second.weights[n]) for n, w in straight.weights.items()), (
            "law 29: a resumed run ends with other weights: keep state in checkpoint_save and read it in checkpoint_load"
        )

    def test_an_error_of_the_run_stays_visible(self, tmp_path: Path) -> None:
        """The plugin does not swallow what another plugin raises."""

        class Fails:
            @hookimpl
            def score(self, run: Any, batch: Any) -> Any:
                raise RuntimeError("on purpose")

        trainer = Trainer(fake_config(tmp_path / "run"))
        trainer.run.manager.register(self.make())
        trainer.run.manager.register(Fails())
        try:
            trainer.train()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must name the cause
            assert "on purpose" in f"{error} {error.__cause__}", f"the plugin replaced the error of another: {error!r}"
        else:
            raise AssertionError("the plugin swallowed an error that another plugin raised")
