"""Seeds of samples, and the bookkeeping of what the engine owes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from jackfield.components import Request, Sample
from jackfield.errors import WorkerError


def sample_seed(run_seed: int, step: int, sample_id: int, turn: int = 0) -> int:
    """A seed in [0, 2^63) that depends on its arguments alone: not on the process, its hash seed or how often anything was drawn."""
    digest = hashlib.blake2b(f"{run_seed}:{step}:{sample_id}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def gather(requests: Sequence[Request], samples: Iterable[Sample]) -> list[list[Sample]]:
    """Samples by request and seed, in the order asked for, however they finish. Raises WorkerError unless each comes exactly once."""
    wanted = {r.id: len(r.seeds) for r in requests}
    found: dict[tuple[int, int], Sample] = {}
    for sample in samples:
        key = (sample.request_id, sample.index)
        if not 0 <= sample.index < wanted.get(sample.request_id, 0):
            raise WorkerError(f"the engine returned sample {sample.index} of request {sample.request_id}, which nobody asked for")
        if key in found:
            raise WorkerError(f"the engine returned sample {sample.index} of request {sample.request_id} twice")
        found[key] = sample
    total = sum(wanted.values())
    if len(found) != total:
        lost = next((r.id, i) for r in requests for i in range(len(r.seeds)) if (r.id, i) not in found)
        raise WorkerError(f"the engine returned {len(found)} of {total} samples; first missing: sample {lost[1]} of request {lost[0]}")
    return [[found[r.id, i] for i in range(len(r.seeds))] for r in requests]
