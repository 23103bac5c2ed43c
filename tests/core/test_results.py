"""What a plugin gives back is checked where it arrives: one line that names the plugin, what it gave and what is wanted."""

import dataclasses

import pytest
import torch

from jackfield import hookimpl
from jackfield.errors import DataError, JackfieldError, PluginError
from jackfield.testing.fakes import FakeBackend, FakeDataset, FakeEngine, FakeRollout
from jackfield.testing.runs import FakeAlgorithm, fake_run

BT = r"\[16, 7\]"
"""Four prompts with four samples each, prompts of one token, responses of six."""


def here(name: str) -> str:
    return f"{__file__}:{name}"


class Reduced(FakeAlgorithm):
    def advantage(self, batch):
        return batch.replace(advantages=batch.rewards)


class Cut(FakeAlgorithm):
    def advantage(self, batch):
        return batch.replace(advantages=torch.zeros(len(batch), batch.tokens.shape[1] - 1))


class Bare(FakeAlgorithm):
    def advantage(self, batch):
        return batch.rewards


class Forgot(FakeAlgorithm):
    def advantage(self, batch):
        return batch


class Silent(FakeAlgorithm):
    def advantage(self, batch):
        return None


class BareLoss(FakeAlgorithm):
    def loss(self, outputs, batch):
        return outputs.log_probs


class SampleStats(FakeAlgorithm):
    def loss(self, outputs, batch):
        out = super().loss(outputs, batch)
        return dataclasses.replace(out, stats={"mine": out.loss.sum(-1)})


class NoBatch(FakeRollout):
    def collect(self, run, prompts):
        return [prompts]


class CutMask(FakeRollout):
    def collect(self, run, prompts):
        batch = super().collect(run, prompts)
        return batch.replace(response_mask=batch.response_mask[:, :-1])


class Shifted(FakeBackend):
    """Hands on its log-probs as the model has them, one a label."""

    def _outputs(self, batch, request):
        out = super()._outputs(batch, request)
        return dataclasses.replace(out, log_probs=out.log_probs[:, 1:])


class LosesOne(FakeBackend):
    def forward(self, micro_batches, request):
        return super().forward(micro_batches, request)[:-1]


class Ragged(FakeEngine):
    def _sample(self, *args):
        sample = super()._sample(*args)
        return dataclasses.replace(sample, log_probs=sample.log_probs[:-1])


class Texts(FakeDataset):
    def __getitem__(self, index):
        return "2"


TWO_STEPS = {"name": "jackfield.testing.runs:FakeAlgorithm", "mini_batches": 2}
"""Makes the run compute old log-probs by `Backend.forward`."""


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"algorithm": here("Reduced")}, rf"Reduced' returned from hook 'advantage' advantages of shape \[16\].*{BT} is wanted"),
        ({"algorithm": here("Cut")}, rf"Cut' returned from hook 'advantage' advantages of shape \[16, 6\].*{BT} is wanted"),
        ({"algorithm": here("Bare")}, "Bare' returned from hook 'advantage' a Tensor; a Batch is wanted"),
        ({"algorithm": here("Forgot")}, f"Forgot' returned from hook 'advantage' advantages as NoneType; a tensor of shape {BT} is wanted"),
        ({"algorithm": here("Silent")}, "no result came back from hook 'advantage' of .*Silent.*: one must return it"),
        ({"algorithm": here("BareLoss")}, r"loss returned a Tensor; return LossOutput\(per-token loss\)"),
        ({"algorithm": here("SampleStats")}, rf"SampleStats returned mine of shape \[16\].*{BT} is wanted"),
        ({"rollout": here("NoBatch")}, "NoBatch' returned from hook 'rollout' a list; a Batch is wanted"),
        ({"rollout": here("CutMask")}, rf"CutMask' returned from hook 'rollout' response_mask of shape \[16, 6\].*{BT} is wanted"),
        ({"policy": {"backend": here("Shifted")}}, rf"the policy's backend returned log_probs of shape \[16, 6\].*{BT} is wanted"),
        (
            {"policy": {"backend": here("Shifted")}, "algorithm": TWO_STEPS},
            rf"backend Shifted returned log_probs of shape \[16, 6\].*{BT} is wanted",
        ),
        (
            {"policy": {"backend": here("LosesOne")}, "algorithm": TWO_STEPS},
            "backend LosesOne returned outputs of 0 micro-batches, but was given 1",
        ),
        ({"engine": here("Ragged")}, "engine Ragged returned a sample with 6 tokens, 5 log_probs, 6 versions; one each a token is wanted"),
        ({"dataset": here("Texts")}, "dataset Texts returned a str as a row; a dict with `prompt` is wanted"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(next(iter(value.values()))).rpartition(":")[2].strip("'}"),
)
def test_components(tmp_path, fields, wanted):
    with pytest.raises(JackfieldError, match=wanted) as caught:
        fake_run(tmp_path, **fields)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, DataError if "dataset" in fields else PluginError)


class VerdictOfTokens:
    @hookimpl
    def filter(self, run, batch):
        return batch.loss_mask


class VerdictOfNumbers:
    @hookimpl
    def filter(self, run, batch):
        return batch.rewards


class BareScores:
    @hookimpl
    def score(self, run, batch):
        return torch.zeros(len(batch))


class ShortScores:
    @hookimpl
    def score(self, run, batch):
        return {"mine": torch.zeros(3)}


class Number:
    @hookimpl(tryfirst=True)
    def update(self, run, batch):
        return 3.0


class ForgetsToReturn:
    @hookimpl(wrapper=True)
    def score(self, run, batch):
        yield


class WrapsWrongly:
    @hookimpl(wrapper=True)
    def score(self, run, batch):
        scores = yield
        return [*scores, {"mine": torch.zeros(3)}]


@pytest.mark.parametrize(
    ("plugin", "wanted"),
    [
        (VerdictOfTokens, rf"VerdictOfTokens' returned from hook 'filter' a verdict of shape {BT}, torch.bool; .*\[16\] is wanted"),
        (
            VerdictOfNumbers,
            r"VerdictOfNumbers' returned from hook 'filter' a verdict .* torch.float32; torch.bool of shape \[16\] is wanted",
        ),
        (BareScores, "BareScores' returned from hook 'score' a Tensor; a Mapping is wanted"),
        (ShortScores, r"ShortScores' returned from hook 'score' mine of shape \[3\].*\[16\] is wanted"),
        (Number, "Number' returned from hook 'update' a float; a Mapping is wanted"),
        (ForgetsToReturn, "no result came back from hook 'score' of .*ForgetsToReturn.*a wrapper what its yield gave"),
        (WrapsWrongly, r"WrapsWrongly' returned from hook 'score' mine of shape \[3\].*\[16\] is wanted"),
    ],
)
def test_hooks(tmp_path, plugin, wanted):
    with pytest.raises(PluginError, match=wanted) as caught:
        fake_run(tmp_path, plugins=[plugin()])
    assert "\n" not in str(caught.value)
