"""Engine `hf`: generates with a transformers model that serves from the trainer's own storage."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from pydantic import Field
from torch import Tensor, nn

from jackfield.components import ComponentConfig, Engine, Position, Request, Sample, WorkerContext
from jackfield.config import ModelConfig, SamplingConfig
from jackfield.errors import DataError
from jackfield.shard import Shard
from jackfield_hf.cache import NAME, SlotCache
from jackfield_hf.sampling import Uniforms, draw_mixed
from jackfield_reshard.modules import adopt_into, materialise, module_shards, plain_head, weights

_log = logging.getLogger(__name__)


class HFConfig(ComponentConfig):
    """Settings of engine `hf`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights it serves; auto: the training backend's, which is what sharing them needs."""
    max_batch: int = Field(default=64, gt=0)
    """Most samples that are generated at a time."""
    cache_tokens: int = Field(default=262144, gt=0)
    """Most tokens for which keys and values are reserved; limits the samples at a time where they may become long."""
    prefill_tokens: int = Field(default=8192, gt=0)
    """Most prompt tokens, padding included, in one forward pass; a longer prompt goes alone."""


@dataclass
class _Row:
    """One running sample."""

    request: Request
    index: int
    uniforms: Uniforms
    limit: int
    """Most tokens it may have, by `max_new_tokens` and by the context."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens in the cache: all but the newest."""
        return len(self.request.tokens) + len(self.tokens) - 1


class HFEngine(Engine):
    """Continuous batching over slots: prompts are read once a group, finished samples leave at once, and others take their place."""

    Config = HFConfig
    config: Any

    def setup(self, model: ModelConfig, context: WorkerContext) -> None:
        """See Engine. Parameters have no storage yet; buffers are computed here."""
        self.path, self.context = model.path, context
        dtype = context.dtype if self.config.dtype == "auto" else self.config.dtype
        settings = transformers.AutoConfig.from_pretrained(model.path)
        with _parameters_on_meta():
            self.model: Any = transformers.AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype))
        for part in self.model.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(context.device)
        self.model.eval().requires_grad_(False)
        self.context_length: int = getattr(settings.get_text_config(), "max_position_embeddings", None) or 1 << 30
        self.end_ids = _end_ids(model.path, settings)
        self.cache = SlotCache()
        self.mode: Literal["untried", "slots", "recompute"] = "untried"
        self.version, self.stale = -1, False

    @property
    def position(self) -> Position:
        """Every rank is a replica of its own."""
        return Position(self.context.rank, self.context.world_size)

    def shards(self) -> list[Shard]:
        """See Engine. Storage that is not adopted is reserved when it is first asked for, and takes memory once it is written."""
        return module_shards(self._stored())

    def _stored(self) -> nn.Module:
        fresh: dict[Tensor, nn.Parameter] = {}
        for part in self.model.modules():
            for name, old in part._parameters.items():
                if old is not None and old.is_meta:
                    if old not in fresh:
                        fresh[old] = materialise(old, self.context.device)
                    part._parameters[name] = fresh[old]
        return self.model

    def adopt(self, shards: Sequence[Shard]) -> bool:
        """See Engine."""
        return adopt_into(self.model, shards, replace=True)

    def load_weights(self, weights_by_name: Iterable[tuple[str, Tensor]]) -> None:
        """Full tensors by the names of `shards()`. Raises DataError on a name that the model does not have."""
        mine = {name: tensor for name, tensor, _ in weights(self._stored())}
        for name, tensor in weights_by_name:
            if name not in mine:
                raise DataError(f"engine hf: {type(self.model).__name__} has no weight {name}")
            mine[name].data.copy_(tensor)

    def weights_updated(self, version: int) -> None:
        """See Engine. Samples that are running are read again under the new weights before they go on."""
        self.version, self.stale = version, True

    def sleep(self) -> int:
        """See Engine; nothing may be running."""
        return self.cache.clear()

    def generate(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """See Engine. Raises DataError where a prompt leaves no room for a single token in the model's context."""
        requests = list(requests)
        for request in requests:
            if not 0 < len(request.tokens) < self.context_length:
                raise DataError(
                    f"prompt {request.id}: {len(request.tokens)} tokens + at least 1 new one do not fit into the context of "
                    f"{self.context_length} of {self.path}; shorten or drop the prompt"
                    if request.tokens
                    else f"prompt {request.id}: no tokens; a prompt needs at least one"
                )
        waiting = deque(sorted((r for r in requests if r.seeds), key=lambda r: -len(r.tokens)))
        if not waiting:
            return
        if self.mode == "untried":
            self._try()
        width = max(len(r.tokens) + self._limit(r) for r in waiting)
        most = max(1, min(self.config.max_batch, self.config.cache_tokens // width, sum(len(r.seeds) for r in waiting)))
        self.cache.reserve(most, width)
        todo = deque(_Row(r, i, Uniforms(seed), self._limit(r)) for r in waiting for i, seed in enumerate(r.seeds))
        rows: list[_Row] = []
        self.stale = False
        while todo or rows:
            if self.stale and rows:
                self._read(rows, 0)
            self.stale = False
            free = most - len(rows)
            if todo and (not rows or free >= min(len(todo), max(1, most // 4))):
                new = [todo.popleft() for _ in range(min(free, len(todo)))]
                logits = self._read(new, len(rows))
                rows += new
            else:
                new = rows
                logits = self._decode(rows)
            self._append(new, logits)
            yield from self._finish(rows)

    def _limit(self, request: Request) -> int:
        return min(request.sampling.max_new_tokens, self.context_length - len(request.tokens))

    def _append(self, rows: list[_Row], logits: Tensor) -> None:
        """Sample one more token for each row."""
        uniforms = torch.tensor([next(row.uniforms) for row in rows], dtype=torch.float64, device=logits.device)
        tokens, log_probs = draw_mixed(logits, [row.request.sampling for row in rows], uniforms)
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(self.version)

    def _finish(self, rows: list[_Row]) -> list[Sample]:
        """Take the finished rows out; the last running one moves into each gap."""
        done = []
        for slot in reversed(range(len(rows))):
            row = rows[slot]
            s = row.request.sampling
            stop = not s.ignore_eos and (row.tokens[-1] in self.end_ids or row.tokens[-1] in s.stop_ids)
            if not stop and len(row.tokens) < row.limit:
                continue
            done.append(Sample(row.request.id, row.index, row.tokens, row.log_probs, row.versions, "stop" if stop else "length"))
            last = rows.pop()
            if last is not row:
                if self.mode == "slots":
                    self.cache.move(len(rows), slot, last.cached)
                rows[slot] = last
        return done[::-1]

    # ---- the model ------------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _read(self, rows: list[_Row], start: int) -> Tensor:
        """Fill the slots from `start` on with all that the rows have cached, equal prompts once; logits [rows, V] after it."""
        texts = [tuple(row.request.tokens) + tuple(row.tokens[:-1]) if row.tokens else row.request.tokens for row in rows]
        if self.mode == "recompute":
            return self._recompute(texts)
        out = []
        at = 0
        while at < len(rows):
            unique: dict[tuple[int, ...], int] = {}
            owner: list[int] = []
            for text in texts[at:]:
                wide = max(len(text), *(len(t) for t in unique)) if unique else len(text)
                if text not in unique and unique and (len(unique) + 1) * wide > self.config.prefill_tokens:
                    break
                owner.append(unique.setdefault(text, len(unique)))
            tokens, lengths = self._padded(list(unique))
            index = torch.tensor(owner, device=tokens.device)
            self.cache.reading(index, start + at)
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            last = self._forward(tokens, positions, lengths - 1)
            out.append(last[index] if len(unique) < len(owner) else last)
            at += len(owner)
        return torch.cat(out)

    @torch.no_grad()
    def _decode(self, rows: list[_Row]) -> Tensor:
        """Logits [rows, V] after the newest token of each row."""
        if self.mode == "recompute":
            return self._recompute([(*row.request.tokens, *row.tokens) for row in rows])
        device = self.context.device
        positions = torch.tensor([row.cached for row in rows], device=device)
        self.cache.decoding(positions)
        tokens = torch.tensor([row.tokens[-1] for row in rows], device=device)
        return self._forward(tokens[:, None], positions[:, None], torch.zeros_like(positions))

    def _padded(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Right-padded tokens [n, longest] and lengths [n]."""
        width = max(len(t) for t in texts)
        tokens = torch.tensor([[*t, *[0] * (width - len(t))] for t in texts], device=self.context.device)
        return tokens, torch.tensor([len(t) for t in texts], device=self.context.device)

    def _forward(self, tokens: Tensor, positions: Tensor, at: Tensor) -> Tensor:
        """Logits [n, V] at one place of each row."""
        body = self.model.base_model if self.plain_head else self.model
        out = body(input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, jackfield_cache=self.cache)
        rows = torch.arange(len(tokens), device=tokens.device)
        if self.plain_head:
            return self.model.get_output_embeddings()(out.last_hidden_state[rows, at])
        return out.logits[rows, at]

    def _recompute(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The same without a cache, for architectures whose attention (or lack of it) the cache does not know. Causal, so no mask."""
        tokens, lengths = self._padded(texts)
        return self.model(input_ids=tokens, use_cache=False).logits[torch.arange(len(texts)), lengths - 1]

    @torch.no_grad()
    def _try(self) -> None:
        """Compare reading two prompts of different lengths and decoding one token with plain forward passes.

        A router in bfloat16 may send a token elsewhere on either side, so one agreement out of a few is enough; a wrong mask never agrees.
        """
        own = self.model.config._attn_implementation
        for shift in range(4):
            texts = [[(t + shift) % self.model.config.vocab_size for t in text] for text in ([1, 2, 3, 4], [2, 1])]
            self.model.config._attn_implementation, self.mode = own, "recompute"
            want = self._recompute(texts), self._recompute([[*t, 1] for t in texts])
            self.plain_head = plain_head(self.model, self._padded(texts)[0])
            self.model.config._attn_implementation, self.mode = NAME, "slots"
            rows = [_Row(Request(i, tuple(t), (0,), SamplingConfig()), 0, Uniforms(0), 2) for i, t in enumerate(texts)]
            self.cache.reserve(2, 8)
            try:
                first = self._read(rows, 0)
                for row in rows:
                    row.tokens.append(1)
                if _close(first, want[0]) and _close(self._decode(rows), want[1]):
                    break
            except (ValueError, TypeError, RuntimeError, AttributeError, IndexError):  # features or a signature of its own
                pass
            finally:
                self.cache.clear()
        else:
            self.model.config._attn_implementation, self.mode = own, "recompute"
            _log.warning("engine hf: %s does not work with the cache here; it generates slowly, without one", type(self.model).__name__)


def _close(one: Tensor, other: Tensor) -> bool:
    share = 1e-3 if other.dtype == torch.float32 else 0.1
    return bool((one - other).abs().max() <= share * other.abs().max())


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built here have parameters without storage, but real buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied one comes twice, as the same object
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _end_ids(path: str, settings: Any) -> frozenset[int]:
    """End tokens: the generation config's, else the model config's."""
    found = None
    if not Path(path).is_dir() or (Path(path) / "generation_config.json").is_file():
        try:
            found = transformers.GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:  # a hub model without one
            found = None
    found = settings.get_text_config().eos_token_id if found is None else found
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)
