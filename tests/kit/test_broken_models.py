"""Broken algorithms, backends and engines fail the law that they break, and the failure says which."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from jackfield.components import LossSums, WorkerContext
from jackfield.config import ComponentSpec
from jackfield.registry import load
from jackfield.testing.algorithm import AlgorithmConformance, Case
from jackfield.testing.backend import BackendConformance
from jackfield.testing.engine import EngineConformance, Pair
from jackfield.testing.models import tiny_model
from jackfield.testing.processes import Ranks
from jackfield.testing.runs import FakeAlgorithm

pytest_plugins = ["pytester"]
Torch, HF = load("backend", "torch"), load("engine", "hf")


def here(cls: type) -> str:
    return f"{__file__}:{cls.__name__}"


# ---- algorithms -----------------------------------------------------------------------------------------------------------


class Reduces(FakeAlgorithm):
    """Divides by the tokens of its micro-batch."""

    def loss(self, outputs, batch):
        out = super().loss(outputs, batch)
        return dataclasses.replace(out, loss=out.loss / batch.loss_mask.sum().clamp(min=1))


class ByPlace(FakeAlgorithm):
    """Favours samples that come late."""

    def advantage(self, batch):
        return batch.replace(advantages=torch.arange(len(batch))[:, None] * batch.loss_mask.float())


class CountsMasked(FakeAlgorithm):
    """Compares with all samples, those among them that are not trained."""

    def advantage(self, batch):
        return batch.replace(advantages=(batch.rewards - batch.rewards.mean())[:, None] * batch.loss_mask)


class ReadsMasked(FakeAlgorithm):
    """Reads a score where there is none."""

    def advantage(self, batch):
        spread = batch.scores["task"] - batch.scores["task"].mean()
        return batch.replace(advantages=torch.where(batch.loss_mask, spread[:, None], 0.0))


class NoBaseline(FakeAlgorithm):
    """Says that it compares the samples of a group, and does not."""

    @property
    def needs(self):
        return dataclasses.replace(super().needs, min_group_size=2)

    def advantage(self, batch):
        return batch.replace(advantages=batch.rewards[:, None] * batch.loss_mask)


class Spoils(FakeAlgorithm):
    """Writes into the batch that it was given."""

    def advantage(self, batch):
        batch.rewards.sub_(1.0)
        return super().advantage(batch)


@pytest.mark.parametrize(
    ("algorithm", "method", "arguments", "law"),
    [
        (Reduces, "test_split", ({}, 9, 2), "Laws 1, 2, 7"),
        (ByPlace, "test_order", ({},), "Law 1"),
        (CountsMasked, "test_masked_samples_are_absent", ({},), "Law 4"),
        (ReadsMasked, "test_behind_masks", ({}, 5), "Laws 5 and 15"),
        (NoBaseline, "test_equal_rewards", ({},), "Law 14"),
        (Spoils, "test_contract", ({},), "leaves the batch that it was given as it was"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_algorithms(algorithm, method, arguments, law):
    case, batch = AlgorithmConformance(), Case([3, 4, 5], 10, seed=11)
    inner = getattr(AlgorithmConformance, method).hypothesis.inner_test
    case.algorithm = "grpo"
    inner(case, batch, *arguments)
    case.algorithm = algorithm
    with pytest.raises(Exception, match=f"what is broken: .*{law}"):
        inner(case, batch, *arguments)


def test_a_failure_under_pytest_says_it_too(pytester):
    pytester.makepyfile(
        """
        from jackfield.testing import AlgorithmConformance
        from jackfield.testing.runs import FakeAlgorithm

        class Spoils(FakeAlgorithm):
            def advantage(self, batch):
                batch.rewards.sub_(1.0)
                return super().advantage(batch)

        class TestSpoils(AlgorithmConformance):
            algorithm = Spoils
        """
    )
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-k", "test_contract")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*what is broken: `advantage` fills float32*"])


# ---- backends -------------------------------------------------------------------------------------------------------------


class Averages(Torch):
    """Averages over micro-batches."""

    def forward_backward(self, micro_batches, loss):
        class Share:
            request = loss.request

            def __call__(self, outputs, micro_batch):
                value, sums = loss(outputs, micro_batch)
                return value / len(micro_batches), sums

        return super().forward_backward(micro_batches, Share())


class StartsAnew(Torch):
    """Clears the gradient with each call."""

    def forward_backward(self, micro_batches, loss):
        self.zero_grad()
        return super().forward_backward(micro_batches, loss)


class CountsFillers(Torch):
    """Adds up per micro-batch what belongs to the whole."""

    def forward_backward(self, micro_batches, loss):
        sums = super().forward_backward(micro_batches, loss)
        return LossSums({n: v + len(micro_batches) for n, v in sums.sums.items()}, sums.maxima)


class Decays(Torch):
    """Decays weights whatever the rate."""

    def optimizer_step(self):
        info = super().optimizer_step()
        for shard in self.shards():
            shard.tensor.mul_(0.999)
        return info


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def ranks():
    found = Ranks(1)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("backend", "method", "law"),
    [
        (Averages, "test_micro_batches_do_not_show", "Laws 1 and 2"),
        (StartsAnew, "test_backward_calls_add_up", "Law 6"),
        (CountsFillers, "test_sums_do_not_depend_on_micro_batches", "Law 7"),
        (Decays, "test_rate_zero_changes_nothing", "Law 27"),
    ],
)
def test_backends(backend, method, law, ranks, folder, tmp_path):
    case = BackendConformance()
    case.component = here(backend)
    more = [tmp_path] if method == "test_rate_zero_changes_nothing" else []
    with pytest.raises(AssertionError, match=f"what is broken: {law}"):
        getattr(case, method)(ranks, folder, *more)


# ---- engines --------------------------------------------------------------------------------------------------------------


class OtherTemperature(HF):
    """Reports the log-probs of another distribution than it samples from."""

    def generate(self, requests):
        for sample in super().generate(requests):
            yield dataclasses.replace(sample, log_probs=[x * 0.9 for x in sample.log_probs])


class AppendsEnd(HF):
    """Ends every sample with an end token."""

    def generate(self, requests):
        from jackfield.testing.models import EOS

        for sample in super().generate(requests):
            if sample.finish_reason == "length":
                sample = dataclasses.replace(sample, tokens=[*sample.tokens[:-1], EOS])
            yield sample


class OneSeed(HF):
    """Takes one seed for all."""

    def generate(self, requests):
        yield from super().generate([dataclasses.replace(r, seeds=(7,) * len(r.seeds)) for r in requests])


class OldVersion(HF):
    """Forgets to say that its weights are new."""

    def weights_updated(self, version):
        super().weights_updated(1)


@pytest.mark.parametrize(
    ("engine", "method", "law"),
    [
        (OtherTemperature, "test_log_probs_mean_the_sampling_distribution", "Law 11"),
        (AppendsEnd, "test_ends", "Law 10"),
        (OneSeed, "test_seeds", "Law 18"),
        (OldVersion, "test_sync_is_complete", "Law 23"),
    ],
)
def test_engines(engine, method, law, folder, tmp_path):
    import json
    import shutil

    from jackfield.testing.models import EOS, PAD

    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, PAD], "pad_token_id": PAD, "bos_token_id": 2}))
    names = [ComponentSpec(name=name) for name in (here(engine), "torch", "auto")]
    pair = Pair(*names, model, WorkerContext("policy", torch.device("cpu"), 0))
    arguments = {
        "test_log_probs_mean_the_sampling_distribution": (tmp_path / "plain", 1.0, 1.0),
        "test_sync_is_complete": (tmp_path,),
    }
    with pytest.raises(AssertionError, match=f"what is broken: {law}"):
        getattr(EngineConformance(), method)(pair, *arguments.get(method, ()))
