"""Conformance of a training backend: subclass `BackendConformance`, name the component, and get the laws as tests.

class TestMine(BackendConformance):
    component = "mine"
    options = {"tp": 2}
    world_size = 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from jackfield.batch import Batch
from jackfield.components import OutputRequest
from jackfield.config import ModelConfig, OptimizerConfig
from jackfield.testing.laws import says_which_law
from jackfield.testing.models import plain_model, random_batch, reference_gradient, reference_log_probs, tiny_model
from jackfield.testing.processes import Model, Ranks, SimpleLoss

_AS_GRADIENT = OptimizerConfig(lr=1e3, eps=1e3, max_grad_norm=math.inf)
"""One AdamW step with these moves a weight by lr x g / (|g| + eps), its gradient to three digits and without a kink."""
_TRAIN = OptimizerConfig(lr=1e-3, warmup=2, weight_decay=0.01)


@says_which_law
class BackendConformance:
    """Laws 2, 4, 5, 6, 8, 13, 15, 16, 24, 27 and 29 (docs/laws.md) for one backend in one layout; the numbers are in the tests."""

    component = ""
    """The backend's name in a config."""
    options: dict[str, Any] = {}
    """Its options."""
    world_size = 1
    """Processes, joined by gloo, or by NCCL where `device` is `cuda`."""
    device = "cpu"
    family = "llama"
    """Architecture of the tiny model (jackfield.testing.models.tiny_model)."""
    model_options: dict[str, Any] = {}
    """Further arguments of `tiny_model`."""
    rtol = 1e-5
    """Law 2's tolerance: 1e-5 in float32, 1e-3 in bfloat16; relative to the largest entry."""
    same_names = True
    """Whether `shards()` has the names of the files; False where experts are stacked."""

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> Iterator[Ranks]:
        """The processes, shared by the class's tests."""
        ranks = Ranks(cls.world_size, cls.device)
        yield ranks
        ranks.close()

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny model."""
        return tiny_model(tmp_path_factory.mktemp("model"), cls.family, **cls.model_options)  # type: ignore[arg-type]

    def model(self, ranks: Ranks, folder: Path, optimizer: OptimizerConfig | None = _AS_GRADIENT, **model: Any) -> Model:
        """A fresh backend."""
        return Model(ranks, self.component, self.options, ModelConfig(path=str(folder), **model), optimizer)

    def change(self, ranks: Ranks, folder: Path, *batches: Batch, micro: int | None = None, **model: Any) -> dict[str, Tensor]:
        """What one optimizer step after these batches adds to the weights; the gradient norm is under `norm`."""
        it = self.model(ranks, folder, **model)
        before = it.weights()
        for batch in batches:
            it.accumulate(batch, micro=micro)
        norm = it.step()["grad_norm"]
        after = it.weights()
        return {name: after[name].float() - before[name].float() for name in before} | {"norm": torch.tensor(norm)}

    def same(self, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        """Equal within `rtol` of the largest change; in narrow types, where weights are rounded, the gradient norm alone counts."""
        if self.rtol > 1e-5:
            got, want = {"norm": got["norm"]}, {"norm": want["norm"]}
        largest = max(float(v.abs().max()) for v in want.values())
        for name in want:
            scale = float(want[name]) if name == "norm" else largest
            worst = float((got[name] - want[name]).abs().max())
            assert worst <= self.rtol * scale, f"{name}: differs by {worst:.3g}, {worst / scale:.3g} of the scale"

    def test_log_probs_are_those_of_transformers(self, ranks: Ranks, folder: Path) -> None:
        """Laws 8 and 11: the value at [b, t] belongs to token t; temperatures 0.5, 1 and 1.3."""
        batch = random_batch()
        it = self.model(ranks, folder, None)
        plain = plain_model(folder)
        for temperature in (0.5, 1.0, 1.3):
            got = it.forward(batch, OutputRequest(temperature=temperature), micro=3)["log_probs"]
            with torch.no_grad():
                want = reference_log_probs(plain, batch, temperature)
            error = torch.where(batch.response_mask, got - want, 0).abs()
            assert float(error.max()) < 1e-4 if self.rtol <= 1e-5 else float(error.sum() / batch.response_mask.sum()) < 0.03

    def test_gradient_is_that_of_transformers(self, ranks: Ranks, folder: Path) -> None:
        """The step follows the gradient that plain forward passes give."""
        batch = random_batch()
        want = reference_gradient(folder, batch, SimpleLoss())
        change = self.change(ranks, folder, batch)
        norm = math.sqrt(sum(float(g.square().sum()) for g in want.values()))
        assert float(change["norm"]) == pytest.approx(norm, rel=self.rtol * 10)
        if self.rtol > 1e-5:
            return
        largest = max(float(g.abs().max()) for g in want.values())
        assert len(change.keys() & want.keys()) > len(want) / 2
        for name in change.keys() & want.keys():
            gradient = want[name]
            step = gradient.flatten() / (gradient.flatten().abs() + 1e3) * 1e3
            assert float((change[name] + step).abs().max()) <= 1e-4 * largest, name

    def test_micro_batches_do_not_show(self, ranks: Ranks, folder: Path) -> None:
        """Laws 1 and 2: one ragged batch, micro-batches of 1, 2, 4 and all, and another order of samples."""
        batch = random_batch()
        want = self.change(ranks, folder, batch)
        for micro in (1, 2, 4):
            self.same(self.change(ranks, folder, batch, micro=micro), want)
        self.same(self.change(ranks, folder, batch[torch.randperm(len(batch))], micro=3), want)

    def test_sums_do_not_depend_on_micro_batches(self, ranks: Ranks, folder: Path) -> None:
        """Law 7: what metrics are made of."""
        it = self.model(ranks, folder)
        batch = random_batch()
        sums = [it.accumulate(batch, micro=micro) for micro in (1, 3, None)]
        for other in sums[1:]:
            assert other == pytest.approx(sums[0], rel=self.rtol, abs=self.rtol)

    def test_a_masked_sample_equals_an_absent_one(self, ranks: Ranks, folder: Path) -> None:
        """Law 4: of four samples two are masked; same as the other two alone."""
        batch = random_batch(4, adversarial=False)
        mask = batch.loss_mask.clone()
        mask[[1, 2]] = False
        scale = mask / mask.sum()
        batch = batch.replace(loss_mask=mask, loss_scale=scale)
        self.same(self.change(ranks, folder, batch), self.change(ranks, folder, batch[torch.tensor([0, 3])]))

    def test_nothing_behind_a_mask_is_read(self, ranks: Ranks, folder: Path) -> None:
        """Laws 5 and 15: other garbage, NaN and inf included, behind every mask gives the same bits."""
        one = self.change(ranks, folder, random_batch(garbage=0))
        two = self.change(ranks, folder, random_batch(garbage=10))
        for name in one:
            assert torch.equal(one[name], two[name]), name
            assert one[name].isfinite().all(), name

    def test_backward_calls_add_up(self, ranks: Ranks, folder: Path) -> None:
        """Law 6: backward(A), a forward pass, backward(B), step equals backward(A + B), step."""
        batch = random_batch()
        first, second = batch[:3], batch[3:]
        want = self.change(ranks, folder, batch)
        it = self.model(ranks, folder)
        before = it.weights()
        it.accumulate(first)
        it.forward(second)
        it.accumulate(second, micro=2)
        norm = it.step()["grad_norm"]
        after = it.weights()
        self.same({n: after[n].float() - before[n].float() for n in before} | {"norm": torch.tensor(norm)}, want)
        it.accumulate(first)
        self.ranks_call(ranks, "zero_grad")
        assert it.step()["grad_norm"] == 0

    @staticmethod
    def ranks_call(ranks: Ranks, method: str) -> None:
        """A method of the backend on every rank."""
        ranks.call("call", method)

    def test_scoring_is_deterministic(self, ranks: Ranks, tmp_path: Path) -> None:
        """Law 13: with dropout 0.1 two passes are identical, whatever stood between."""
        folder = tiny_model(tmp_path / "dropout", self.family, **(self.model_options | {"attention_dropout": 0.1}))  # type: ignore[arg-type]
        it = self.model(ranks, folder)
        batch = random_batch()
        one = it.forward(batch)["log_probs"]
        it.accumulate(batch)
        assert torch.equal(one, it.forward(batch)["log_probs"])

    def test_nothing_to_train(self, ranks: Ranks, folder: Path) -> None:
        """Law 16: no trainable token on one rank or on any: the step ends and weights stay."""
        it = self.model(ranks, folder)
        before = it.weights()
        batch = random_batch()
        nothing = torch.zeros_like(batch.loss_mask)
        it.accumulate(batch.replace(loss_mask=nothing, loss_scale=nothing.float()), micro=2)
        assert it.step()["grad_norm"] == 0
        after = it.weights()
        assert all(torch.equal(before[n], after[n]) for n in before)
        half = batch.loss_mask.clone()
        half[::2] = False
        it.accumulate(batch.replace(loss_mask=half, loss_scale=half / half.sum()))
        assert it.step()["grad_norm"] > 0

    def test_shards_are_the_files_weights(self, ranks: Ranks, folder: Path) -> None:
        """Law 24: every tensor of the files, bit for bit, biases and all."""
        have = self.model(ranks, folder).weights()
        files = load_file(folder / "model.safetensors")
        if self.same_names:
            assert set(files) == set(have)
            for name, tensor in files.items():
                assert torch.equal(have[name], tensor.flatten().to(have[name].dtype)), name
        assert sum(t.numel() for t in have.values()) == sum(t.numel() for t in files.values())

    def test_rate_zero_changes_nothing(self, ranks: Ranks, folder: Path, tmp_path: Path) -> None:
        """Law 27: weights stay bit-equal to the files, and so does what is exported."""
        it = self.model(ranks, folder, OptimizerConfig(lr=0.0, weight_decay=0.1))
        before = it.weights()
        for _ in range(2):
            it.accumulate(random_batch())
            assert it.step()["grad_norm"] > 0
        after = it.weights()
        assert all(torch.equal(before[n], after[n]) for n in before)
        out = load_file(it.export(tmp_path / "out") / "model.safetensors")
        files = load_file(folder / "model.safetensors")
        assert set(out) == set(files)
        assert all(torch.equal(out[n], files[n].to(out[n].dtype)) for n in files)

    def test_resume_is_exact(self, ranks: Ranks, folder: Path, tmp_path: Path) -> None:
        """Law 29: 4 steps = 2 + save + a fresh backend + load + 2, to the bit."""
        batches = [random_batch(seed=seed) for seed in range(4)]

        def train(it: Model, some: list[Batch]) -> list[float]:
            rates = []
            for batch in some:
                it.accumulate(batch, micro=3)
                rates.append(it.step()["learning_rate"])
            return rates

        whole = self.model(ranks, folder, _TRAIN)
        rates = train(whole, batches)
        want = whole.weights()
        first = self.model(ranks, folder, _TRAIN)
        train(first, batches[:2])
        saved = first.save(tmp_path / "checkpoint")
        second = self.model(ranks, folder, _TRAIN)
        train(second, batches[3:])
        second.load(saved)
        assert train(second, batches[2:]) == rates[2:]
        got = second.weights()
        assert all(torch.equal(got[n], want[n]) for n in want)

    def test_random_weights_come_from_the_seed(self, ranks: Ranks, folder: Path) -> None:
        """`init: random` gives the same weights for the same seed, and trains."""
        one, two = (self.model(ranks, folder, init="random").weights() for _ in range(2))
        assert all(torch.equal(one[n], two[n]) for n in one)
        assert float(self.change(ranks, folder, random_batch(), init="random")["norm"]) > 0

    def test_value_head_starts_at_zero(self, ranks: Ranks, folder: Path) -> None:
        """A critic: values 0 at first, the same gradient for every split, and values that move."""
        batch = random_batch()
        it = self.model(ranks, folder, OptimizerConfig(lr=1e-2), head="value")
        assert float(it.forward(batch)["values"].abs().max()) == 0
        for _ in range(2):
            it.accumulate(batch)
            it.step()
        moved = it.forward(batch, micro=2)["values"]
        assert float(moved[batch.response_mask].abs().min()) > 0
        torch.testing.assert_close(moved, it.forward(batch)["values"], rtol=self.rtol * 10, atol=self.rtol)
        self.same(self.change(ranks, folder, batch, micro=1, head="value"), self.change(ranks, folder, batch, head="value"))
