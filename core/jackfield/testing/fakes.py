"""A backend, an engine and a dataset that follow the contract and need nothing but torch: one table of logits, a bigram model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jackfield.batch import Batch, Trajectory
from jackfield.components import (
    Backend,
    BackendConfig,
    ComponentConfig,
    Dataset,
    Engine,
    Loss,
    LossSums,
    OutputRequest,
    Outputs,
    Position,
    Request,
    Reward,
    Rollout,
    Sample,
    Transport,
    WorkerContext,
)
from jackfield.hookspecs import hookimpl
from jackfield.schedule import at
from jackfield.shard import Shard, SyncReport

VOCABULARY = 8
END = 1


class FakeBackend(Backend):
    """logits of token t = table[token t - 1]; the value head is a second table. Several workers are data parallel."""

    Config = BackendConfig

    def setup(self, model: Any, optimizer: Any, context: WorkerContext) -> None:
        """Seeded table; plain SGD with the configured rate."""
        generator = torch.Generator().manual_seed(context.seed)
        width = 1 if model.head == "value" else VOCABULARY
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, width, generator=generator) * 0.1)
        self.optimizer, self.steps, self.context = optimizer, 0, context

    @property
    def position(self) -> Position:
        """Every worker has a share of the batch."""
        return Position(self.context.rank, self.context.world_size)

    def _outputs(self, batch: Batch, request: OutputRequest) -> Outputs:
        rows = self.table[batch.tokens[:, :-1]]
        if self.table.shape[1] == 1:
            return Outputs(values=torch.nn.functional.pad(rows[..., 0], (1, 0)))
        log_p = (rows / request.temperature).log_softmax(-1)
        labels = log_p.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return Outputs(torch.nn.functional.pad(labels, (1, 0)), torch.nn.functional.pad(entropy, (1, 0)) if request.entropy else None)

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Batch], request: OutputRequest) -> list[Outputs]:
        """See Backend."""
        return [self._outputs(batch, request) for batch in micro_batches]

    def forward_backward(self, micro_batches: Sequence[Batch], loss: Loss) -> LossSums:
        """See Backend."""
        total = LossSums()
        for batch in micro_batches:
            value, sums = loss(self._outputs(batch, loss.request), batch)
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
            total.add(sums)
        return total

    @torch.no_grad()
    def optimizer_step(self) -> dict[str, float]:
        """See Backend."""
        gradient = torch.zeros_like(self.table) if self.table.grad is None else self.table.grad
        if self.context.world_size > 1:
            torch.distributed.all_reduce(gradient)
        norm, rate = float(gradient.norm()), at(self.optimizer.lr, self.steps)
        self.table.sub_(rate * gradient)
        self.steps += 1
        self.zero_grad()
        return {"grad_norm": norm, "learning_rate": rate}

    def zero_grad(self) -> None:
        """See Backend."""
        self.table.grad = None

    def shards(self) -> list[Shard]:
        """The table."""
        shape = tuple(self.table.shape)
        return [Shard("table", shape, (0, 0), shape, "float32", self.table.data)]

    def save(self, folder: Path) -> None:
        """See Backend."""
        if self.context.rank == 0:
            torch.save({"table": self.table.data, "steps": self.steps}, folder / "table.pt")

    def load(self, folder: Path) -> None:
        """See Backend."""
        state = torch.load(folder / "table.pt")
        self.table.data.copy_(state["table"])
        self.steps = state["steps"]

    def export(self, folder: Path) -> None:
        """The table alone."""
        self.save(folder)


class FakeEngine(Engine):
    """Samples from the adopted table."""

    table: Tensor

    def setup(self, model: Any, context: WorkerContext) -> None:
        """Nothing to load."""
        self.context = context

    @property
    def position(self) -> Position:
        """Every worker is a replica."""
        return Position(self.context.rank, self.context.world_size)

    def generate(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """See Engine; one generator for each sample, so that a batch's make-up does not matter."""
        for request in requests:
            for index, seed in enumerate(request.seeds):
                yield self._sample(request, index, torch.Generator().manual_seed(seed))

    def _sample(self, request: Request, index: int, generator: torch.Generator) -> Sample:
        sampling, last = request.sampling, request.tokens[-1]
        ids: list[int] = []
        log_probs: list[float] = []
        ends = {END, *sampling.stop_ids} if not sampling.ignore_eos else set()
        while len(ids) < sampling.max_new_tokens and not (ids and ids[-1] in ends):
            log_p = (self.table[last] / (sampling.temperature or 1.0)).log_softmax(-1)
            last = int(torch.multinomial(log_p.exp(), 1, generator=generator)) if sampling.temperature else int(log_p.argmax())
            ids.append(last)
            log_probs.append(float(log_p[last]))
        reason = "stop" if ids[-1] in ends else "length"
        return Sample(request.id, index, ids, log_probs, [self.version] * len(ids), reason)

    def shards(self) -> list[Shard]:
        """The table, to be adopted."""
        shape = (VOCABULARY, VOCABULARY)
        return [Shard("table", shape, (0, 0), shape, "float32")]

    def adopt(self, shards: Sequence[Shard]) -> bool:
        """See Engine."""
        assert shards[0].tensor is not None
        self.table = shards[0].tensor
        return True

    def weights_updated(self, version: int) -> None:
        """There are no caches."""
        self.version = version


class FakeTransport(Transport):
    """Adopts the backend's shards as they are; an engine on workers of its own gets them by broadcast."""

    def connect(self, source: Backend | None, destination: Engine | None, context: WorkerContext) -> None:
        """See Transport."""
        self.destination, self.group = destination, context.group
        shape = (VOCABULARY, VOCABULARY)
        self.shards = source.shards() if source else [Shard("table", shape, (0, 0), shape, "float32", torch.empty(shape))]
        if destination:
            destination.adopt(self.shards)

    def sync(self, version: int) -> SyncReport:
        """See Transport."""
        table = self.shards[0].tensor
        assert table is not None
        if self.group is not None:
            torch.distributed.broadcast(table, torch.distributed.get_global_rank(self.group, 0), group=self.group)
        if self.destination:
            self.destination.weights_updated(version)
        return SyncReport(version, bytes_aliased=0 if self.group else table.nbytes, bytes_sent=table.nbytes if self.group else 0)


class FakeDataset(Dataset):
    """Rows whose prompt is one number and whose answer is that number."""

    config: Any

    class Config(ComponentConfig):
        """Size."""

        rows: int = 12
        """Number of rows."""

    def __len__(self) -> int:
        return int(self.config.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": str(2 + index % (VOCABULARY - 2)), "answer": str(2 + index % (VOCABULARY - 2)), "row": index}


class FakeRollout(Rollout):
    """Token ids are numbers in the text; no tokenizer."""

    @hookimpl
    def rollout(self, run: Any, prompts: Any) -> Batch:
        """See Hooks.rollout."""
        return self.collect(run, prompts)

    def collect(self, run: Any, prompts: Any) -> Batch:
        """See Rollout."""
        size, base = run.group_size, run.seed * 7919 + run.step
        requests = []
        for p in prompts:
            seeds = tuple(base * 10007 + p.id * size + k for k in range(size))
            requests.append(Request(p.id, tuple(int(t) for t in p.record["prompt"].split()), seeds, run.sampling))
        found = {(s.request_id, s.index): s for s in run.policy.generate(requests)}
        items = []
        for prompt, request in zip(prompts, requests, strict=True):
            for index in range(size):
                s, n = found[prompt.id, index], len(request.tokens)
                lists = s.log_probs.tolist(), s.versions.tolist()
                record = {**prompt.record, "response": " ".join(map(str, s.tokens))}
                tokens, sampled = [*request.tokens, *s.tokens], [False] * n + [True] * len(s.tokens)
                log_probs, versions = [0.0] * n + lists[0], [-1] * n + lists[1]
                items.append(Trajectory(prompt, tokens, n, sampled, log_probs, versions, s.finish_reason, record))
        return Batch.from_trajectories(items, group_size=size)


class FakeReward(Reward):
    """Share of the response's tokens that equal the answer."""

    def score(self, records: Sequence[dict[str, Any]]) -> list[float]:
        """See Reward."""
        words = [(r["response"].split(), r["answer"]) for r in records]
        return [sum(w == answer for w in response) / max(len(response), 1) for response, answer in words]
