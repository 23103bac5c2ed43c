"""Conformance of a rollout engine: subclass `EngineConformance`, name the component, and get the laws as tests.

class TestMine(EngineConformance):
    component = "mine"
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jackfield import registry
from jackfield.components import Backend, Engine, Request, Sample, Transport, WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, SamplingConfig
from jackfield.errors import JackfieldError
from jackfield.shard import SyncReport
from jackfield.testing.laws import says_which_law
from jackfield.testing.models import EOS, PAD, plain_model, tiny_model


def sampling_log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Log-probs [N] of `labels` under the sampling distribution of `logits` [N, V], written out plainly to hold faster ways against."""
    scores = logits.float() / temperature
    ranked, order = scores.sort(-1, descending=True)
    drop = torch.arange(scores.shape[-1]) >= (top_k or scores.shape[-1])
    p = ranked.masked_fill(drop, -torch.inf).softmax(-1)
    drop = drop | (p.cumsum(-1) - p >= top_p)
    kept = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    kept = kept.scatter(-1, labels[:, None], scores.gather(-1, labels[:, None]))
    return kept.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


_PROMPTS: tuple[tuple[int, ...], ...] = ((5,), (7, PAD, 9, PAD), tuple(range(10, 30)), (5, 6, 7), (8, 8, 8, 8, 8, 8, 8))


class Pair:
    """An engine with the backend whose weights it serves."""

    def __init__(
        self, engine: ComponentSpec, backend: ComponentSpec, transport: ComponentSpec, folder: Path, context: WorkerContext
    ) -> None:
        self.backend: Backend = registry.build("backend", backend)
        self.engine: Engine = registry.build("engine", engine)
        self.transport: Transport = registry.build("transport", transport)
        model = ModelConfig(path=str(folder))
        self.folder, self.version = folder, 0
        self.backend.setup(model, None, context)
        self.engine.setup(model, context)
        self.transport.connect(self.backend, self.engine, context)
        self.sync()

    def sync(self) -> SyncReport:
        """The next version."""
        self.version += 1
        return self.transport.sync(self.version)

    def perturb(self, seed: int, *, only: str = "") -> None:
        """Change every weight of the backend whose name contains `only`."""
        generator = torch.Generator().manual_seed(seed)
        for shard in self.backend.shards():
            if shard.tensor is not None and not shard.buffer and only in shard.name:
                noise = torch.randn(shard.size, generator=generator) * 0.05
                shard.tensor.add_(noise.to(shard.tensor.device, shard.tensor.dtype))

    def plain(self, scratch: Path) -> Any:
        """The backend's present weights in a plain transformers model."""
        self.backend.export(scratch)
        return plain_model(scratch)


@says_which_law
class EngineConformance:
    """Laws 10, 11, 18, 23 and 26 (docs/laws.md) for one engine on one process."""

    component = ""
    """The engine's name in a config."""
    options: dict[str, Any] = {}
    """Its options."""
    backend = "torch"
    """Whose weights it serves."""
    backend_options: dict[str, Any] = {}
    transport = "auto"
    family = "llama"
    model_options: dict[str, Any] = {}
    dtype = "float32"
    """Type of the weights on both sides."""
    max_gap = 1e-4
    """Law 11: largest difference of a log-prob from a plain float32 forward pass."""
    mean_gap = 1e-4
    """Law 11: mean difference."""
    exact_seeds = True
    """Whether a sample is the same in any company; narrow types may round differently in another batch."""
    device = "cpu"

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        """One engine for the class's tests. Its model has two end tokens, one of which is the pad token."""
        folder = tiny_model(tmp_path_factory.mktemp("model"), cls.family, **cls.model_options)  # type: ignore[arg-type]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, PAD], "pad_token_id": PAD, "bos_token_id": 2}))
        engine = ComponentSpec(name=cls.component, options=cls.options)
        backend = ComponentSpec(name=cls.backend, options={"dtype": cls.dtype, **cls.backend_options})
        yield Pair(
            engine,
            backend,
            ComponentSpec(name=cls.transport),
            folder,
            WorkerContext("policy", torch.device(cls.device), 0, dtype=cls.dtype),
        )

    @staticmethod
    def requests(count: int = 4, **sampling: Any) -> list[Request]:
        """`count` samples of each prompt."""
        settings = SamplingConfig(**({"max_new_tokens": 12} | sampling))
        return [Request(i, p, tuple(range(100 * i, 100 * i + count)), settings) for i, p in enumerate(_PROMPTS)]

    def generate(self, pair: Pair, requests: list[Request]) -> dict[tuple[int, int], Sample]:
        """Samples by (request, index); exactly the wanted ones, each with as many log-probs and versions as tokens."""
        samples = list(pair.engine.generate(requests))
        found = {(s.request_id, s.index): s for s in samples}
        assert sorted((s.request_id, s.index) for s in samples) == sorted((r.id, i) for r in requests for i in range(len(r.seeds)))
        for s in samples:
            assert len(s.tokens) == len(s.log_probs) == len(s.versions) > 0
            assert set(s.versions) == {pair.version}
        return found

    def agree(self, model: Any, requests: list[Request], samples: dict[tuple[int, int], Sample]) -> None:
        """Every reported log-prob is that of a plain forward pass under the sampling distribution (law 11)."""
        gaps = []
        for (request_id, _), sample in samples.items():
            request = requests[request_id]
            logits, labels = self.score(model, request, sample)
            s = request.sampling
            want = sampling_log_probs(logits, labels, s.temperature or 1.0, s.top_p, s.top_k)
            gaps.append((torch.tensor(sample.log_probs) - want).abs())
        gap = torch.cat(gaps)
        assert float(gap.max()) <= self.max_gap, f"largest gap {float(gap.max()):.2g}"
        assert float(gap.mean()) <= self.mean_gap, f"mean gap {float(gap.mean()):.2g}"

    @staticmethod
    @torch.no_grad()
    def score(model: Any, request: Request, sample: Sample) -> tuple[Tensor, Tensor]:
        """Logits [n, V] before each sampled token, and the tokens."""
        tokens = torch.tensor([[*request.tokens, *sample.tokens]])
        start = len(request.tokens)
        return model(input_ids=tokens).logits[0, start - 1 : -1], tokens[0, start:]

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
    @pytest.mark.parametrize("top_p", [1.0, 0.9])
    def test_log_probs_mean_the_sampling_distribution(self, pair: Pair, tmp_path: Path, temperature: float, top_p: float) -> None:
        """Law 11, pad ids inside prompts included (law 10)."""
        requests = self.requests(temperature=temperature, top_p=top_p)
        self.agree(pair.plain(tmp_path), requests, self.generate(pair, requests))

    def test_top_k(self, pair: Pair, tmp_path: Path) -> None:
        """Only the k most likely tokens are sampled, and their log-probs say so."""
        requests = self.requests(top_k=3)
        samples = self.generate(pair, requests)
        model = pair.plain(tmp_path)
        self.agree(model, requests, samples)
        for (request_id, _), sample in samples.items():
            logits, labels = self.score(model, requests[request_id], sample)
            rank = (logits > logits.gather(-1, labels[:, None]) + 10 * self.max_gap).sum(-1)
            assert int(rank.max()) < 3

    def test_temperature_zero_takes_the_most_likely(self, pair: Pair, tmp_path: Path) -> None:
        """Greedy: no logit of a plain forward pass is larger than the chosen token's; scored at temperature 1."""
        requests = self.requests(1, temperature=0.0)
        samples = self.generate(pair, requests)
        model = pair.plain(tmp_path)
        self.agree(model, requests, samples)
        for (request_id, _), sample in samples.items():
            logits, labels = self.score(model, requests[request_id], sample)
            assert float((logits.amax(-1) - logits.gather(-1, labels[:, None])[:, 0]).max()) <= 2 * self.max_gap

    def test_ends(self, pair: Pair) -> None:
        """Law 10: end tokens (one of them the pad token) and stop ids end a sample and belong to it; nothing is appended otherwise."""
        ends = {EOS, PAD, 11, 12, 13, 14, 15, 16}
        samples = self.generate(pair, self.requests(16, stop_ids=tuple(sorted(ends - {EOS, PAD})), max_new_tokens=10, temperature=1.3))
        for sample in samples.values():
            assert not ends.intersection(sample.tokens[:-1])
            assert sample.finish_reason == ("stop" if sample.tokens[-1] in ends else "length")
            assert len(sample.tokens) == 10 or sample.finish_reason == "stop"
        assert {s.finish_reason for s in samples.values()} == {"stop", "length"}
        forced = self.generate(pair, self.requests(4, ignore_eos=True, stop_ids=(11,), max_new_tokens=10, temperature=1.3))
        assert {(len(s.tokens), s.finish_reason) for s in forced.values()} == {(10, "length")}

    def test_seeds(self, pair: Pair) -> None:
        """Law 18: eight seeds, eight samples, not all equal; the same seeds give the same samples again, alone or in company."""
        requests = self.requests(8)
        one = self.generate(pair, requests)
        two = self.generate(pair, requests[::-1] if self.exact_seeds else requests)
        for request in requests:
            assert len({tuple(one[request.id, i].tokens) for i in range(8)}) > 1
        assert {k: s.tokens for k, s in one.items()} == {k: s.tokens for k, s in two.items()}
        if not self.exact_seeds:
            return
        alone = list(pair.engine.generate(requests[2:3]))
        assert {s.index: s.tokens for s in alone} == {i: one[2, i].tokens for i in range(8)}

    def test_no_requests(self, pair: Pair) -> None:
        """Nothing asked, nothing generated."""
        assert list(pair.engine.generate([])) == []

    def test_too_long_a_prompt(self, pair: Pair) -> None:
        """An error of one line that names the prompt and its length; the engine works on."""
        with pytest.raises(JackfieldError, match=r"77.*300|300.*77") as caught:
            list(pair.engine.generate([Request(77, tuple([5] * 300), (0,), SamplingConfig(max_new_tokens=4))]))
        assert "\n" not in str(caught.value)
        self.generate(pair, self.requests(1))

    def test_sync_is_complete(self, pair: Pair, tmp_path: Path) -> None:
        """Law 23: change one kind of weight after the other; each change arrives, and the version with it."""
        requests = self.requests(1)
        names = [s.name for s in pair.backend.shards() if not s.buffer]
        kinds = sorted({name.split(".layers.")[-1].partition(".")[2] if ".layers." in name else name for name in names})
        for seed, kind in enumerate(kinds):
            pair.perturb(seed, only=kind)
            report = pair.sync()
            assert report.version == pair.engine.version == pair.version
            assert report.bytes_aliased + report.bytes_copied + report.bytes_sent > 0
            if seed % 4 == 0 or kind == kinds[-1]:
                self.agree(pair.plain(tmp_path / str(seed)), requests, self.generate(pair, requests))

    def test_shards_equal_the_backends(self, pair: Pair) -> None:
        """Law 24: tensors that both sides hold under one name and shape are equal bit for bit."""
        mine = {s.name: s for s in pair.backend.shards()}
        for shard in pair.engine.shards():
            other = mine.get(shard.name)
            if other is not None and other.shape == shard.shape and shard.tensor is not None and other.tensor is not None and shard.full:
                assert torch.equal(shard.tensor, other.tensor.to(shard.tensor.dtype)), shard.name

    def test_caches_follow_weights(self, pair: Pair, tmp_path: Path) -> None:
        """Law 26: prompts that were read under old weights are read again under new ones."""
        requests = self.requests(2)
        self.generate(pair, requests)
        pair.perturb(99)
        pair.sync()
        self.agree(pair.plain(tmp_path), requests, self.generate(pair, requests))

    def test_sleep(self, pair: Pair, tmp_path: Path) -> None:
        """Sleep, wake and sync leave a working engine (law 24)."""
        assert pair.engine.sleep() >= 0
        pair.engine.wake()
        pair.sync()
        requests = self.requests(1)
        self.agree(pair.plain(tmp_path), requests, self.generate(pair, requests))
