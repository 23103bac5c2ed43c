"""Role handles: the only way in which hooks reach models. They split batches over workers and gather results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from jackfield import microbatch
from jackfield.batch import Batch, any_token
from jackfield.components import OutputRequest, Outputs, Position, Request, Sample
from jackfield.config import RunConfig, role_config
from jackfield.loss import finish, reduction_scale
from jackfield.shard import BYTES, SyncReport

if TYPE_CHECKING:
    from jackfield.algorithm import Algorithm
    from jackfield.launcher import WorkerGroup


class Role:
    """A model on its workers: `run.reference`, `run.critic`, and the base of `run.policy`."""

    def __init__(self, name: str, group: WorkerGroup, config: RunConfig) -> None:
        self.name, self.group, self.config = name, group, config
        self.role = role_config(config, name)
        self.positions: list[Position] = group.call("setup", name)

    def _split(self, batch: Batch) -> tuple[list[list[list[int]]], list[microbatch.Share]]:
        """The plan by DP rank, and each worker's share, without records: text stays on the controller."""
        ranks = self.positions[0].dp_size
        split = microbatch.plan(batch.lengths.tolist(), ranks, self.role.micro_batch_tokens, batch.group_ids.tolist())
        shares = [microbatch.share(batch, bins) for bins in split]
        return split, [shares[p.dp_rank] for p in self.positions]

    def request(self, **wanted: bool) -> OutputRequest:
        """A request for outputs under the run's sampling distribution; greedy sampling is scored at temperature 1."""
        s = self.config.sampling
        return OutputRequest(temperature=s.temperature or 1.0, top_p=s.top_p, top_k=s.top_k, **wanted)

    def forward(self, batch: Batch, request: OutputRequest) -> Outputs:
        """Outputs of the whole batch, [B, T] on the CPU, 0 outside `response_mask`."""
        mask = batch.response_mask
        some = any_token(mask).nonzero()[:, 0]
        whole: dict[str, Tensor] = defaultdict(lambda: torch.zeros(mask.shape))
        if len(some):
            # Scoring reads neither text nor what the engine said of its tokens, nearly half of the bytes.
            split, shares = self._split(batch.replace(records=None, rollout_log_probs=None, versions=None).keep(any_token(mask)))
            results = self.group.scatter("forward", self.name, shares, request)
            for position, outputs in zip(self.positions, results, strict=True):
                for indices, out in zip(split[position.dp_rank], outputs or (), strict=False):
                    for name, value in vars(out).items():
                        if value is not None and indices:
                            whole[name][some[torch.tensor(indices)], : value.shape[1]] = value
        names = [n for n in ("log_probs", "entropy", "sum_pi_squared") if getattr(request, n)]
        return Outputs(**{n: torch.where(mask, whole[n], 0) if n in whole else torch.zeros(mask.shape) for n in {*names, *whole}})

    def log_probs(self, batch: Batch) -> Tensor:
        """float32 [B, T]: log-probs of the sampled tokens under the sampling distribution."""
        return cast(Tensor, self.forward(batch, self.request()).log_probs)

    def values(self, batch: Batch) -> Tensor:
        """float32 [B, T]: the critic's values."""
        found = self.forward(batch, self.request(log_probs=False)).values
        return torch.zeros(batch.tokens.shape) if found is None else found

    def update(self, algorithm: Algorithm, batch: Batch) -> dict[str, float]:
        """One optimizer step on a mini-batch. With nothing to train nothing moves (law 16): metrics are `skipped` = 1 alone."""
        batch = batch.replace(records=None).keep(any_token(batch.loss_mask)).trim()
        prefix = "" if self.name == "policy" else f"{self.name}/"
        if not len(batch):
            return {f"{prefix}skipped": 1.0}
        config = algorithm.config
        scale = reduction_scale(batch.loss_mask, config.reduction, config.fixed_length or self.config.sampling.max_new_tokens)
        _, shares = self._split(batch.replace(loss_scale=scale))
        request = algorithm.request(self.config.sampling)
        results = self.group.scatter("update", self.name, shares, request, algorithm.state_dict())
        metrics = finish([sums for sums, _ in results if sums is not None]) | results[0][1]
        return {f"{prefix}{name}": value for name, value in metrics.items()} | {f"{prefix}skipped": 0.0}

    def save(self, folder: Path) -> None:
        """Write the role's share of a checkpoint into a new folder."""
        folder.mkdir()
        self.group.call("backend", self.name, "save", folder)

    def load(self, folder: Path) -> None:
        """Restore the role. Raises CheckpointError."""
        self.group.call("backend", self.name, "load", folder)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        self.group.call("backend", self.name, "export", folder)


class Policy(Role):
    """The model being trained, with its engine."""

    version = 0
    """Version of the weights that the engine serves: the number of steps trained."""

    def __init__(self, groups: Mapping[str, WorkerGroup], config: RunConfig) -> None:
        super().__init__("policy", groups["policy"], config)
        self.engines = groups.get("engine", self.group)
        self.link = groups.get("link", self.group)
        """Trainers and engines together."""
        self.replicas: list[Position] = [p for p in self.link.call("setup_engine") if p is not None]

    def generate(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """Samples as they finish, in any order; requests are dealt to the engine's replicas, longest prompts first."""
        count = self.replicas[0].dp_size
        order = sorted(requests, key=lambda r: -len(r.tokens))
        yield from self.engines.stream("generate", [order[p.dp_rank :: count] for p in self.replicas])

    def sync(self, version: int) -> SyncReport:
        """Serve the policy's current weights as `version`; seconds of the slowest rank, bytes of all."""
        reports: list[SyncReport] = self.link.call("sync", version)
        self.version = version
        phases = sorted({name for r in reports for name in r.seconds})
        seconds = {name: max(r.seconds.get(name, 0.0) for r in reports) for name in phases}
        return SyncReport(version, seconds, *(sum(getattr(r, n) for r in reports) for n in BYTES))
