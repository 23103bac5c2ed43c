"""The engine itself: requests in, finished samples out, weights as views of vLLM's storage."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from jackfield.components import ComponentConfig, Engine, Position, Request, Sample, WorkerContext
from jackfield.errors import ConfigError, DataError
from jackfield.shard import Shard

if TYPE_CHECKING:
    from torch import Tensor

    from jackfield.config import ModelConfig
    from jackfield_vllm.adapter import Core
    from jackfield_vllm.loader import Weights


class VLLMConfig(ComponentConfig):
    """Settings of engine `vllm`; the defaults are tuned (docs/engines/vllm.md)."""

    tp: int = Field(default=1, gt=0)
    """Tensor parallelism: workers that share one replica."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and KV cache; auto: the training backend's, which is what sharing them needs."""
    memory: float | None = Field(default=None, gt=0, lt=1)
    """Share of the device's memory for weights and KV cache; the rest is the trainer's. Default: 0.5 on CUDA, 0.1 on CPU."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Longest prompt and response together, in tokens. Default: the model's own limit."""
    max_num_seqs: int | None = Field(default=None, gt=0)
    """Most samples decoded at once. Default: 1024 on CUDA, 256 on CPU."""
    max_num_batched_tokens: int | None = Field(default=None, gt=0)
    """Most tokens computed in one step, prefill included. Default: 16384 on CUDA, 8192 on CPU."""
    cuda_graphs: bool = True
    """Capture decode steps of up to `max_num_seqs` samples as CUDA graphs; off is slower by far, and starts faster."""
    cpu_linear: Literal["shared", "packed"] = "shared"
    """On CPU, multiply by the weights as they are, which the trainer can share, or by a copy packed for oneDNN at each sync."""
    block_size: int | None = Field(default=None, gt=0)
    """Tokens in a block of the KV cache; prefixes are shared in whole blocks. Default: 16 on CUDA, 32 on CPU."""
    args: dict[str, Any] = {}
    """Further arguments of vLLM's EngineArgs by their own names; they win over everything here."""


class VLLM(Engine):
    """vLLM in the worker's process. With TP, every rank of a replica gets the same requests and steps in the same order."""

    Config = VLLMConfig
    config: VLLMConfig
    core: Core | None = None

    def setup(self, model: ModelConfig, context: WorkerContext) -> None:
        """See Engine. Raises PluginError where vLLM is missing or of the wrong version, ConfigError where memory or layout do not fit."""
        from jackfield_vllm import adapter

        adapter.version()
        if context.world_size % self.config.tp:
            raise ConfigError(f"engine.tp {self.config.tp} must divide the policy's {context.world_size} workers")
        self.context, self.path = context, Path(model.path)
        adapter.prepare(context.device, context.rank, context.world_size)
        from jackfield_vllm.loader import register

        register()
        self.ends = end_ids(self.path)
        self._build()

    def _build(self) -> None:
        from jackfield_vllm import arguments
        from jackfield_vllm.adapter import Core

        given = arguments.engine_arguments(self.config, self.path, self.context)
        try:
            self.core = Core(given, plain_linears=self.config.cpu_linear == "shared")
        except ValueError as error:
            text = " ".join(str(error).partition("For further information")[0].split()).rstrip(".")
            if "gpu_memory_utilization" in text:
                text += "; here that is engine.memory or engine.args.kv_cache_memory_bytes, and engine.max_model_len"
            raise ConfigError(f"engine vllm: vLLM refuses {self.path}: {text}") from error

    @property
    def _core(self) -> Core:
        assert self.core is not None, "setup comes first"
        return self.core

    @property
    def _weights(self) -> Weights:
        weights: Any = self._core.model.jackfield
        return weights

    @property
    def position(self) -> Position:
        """Replica and whether this rank returns its samples."""
        tp = self.config.tp
        return Position(self.context.rank // tp, self.context.world_size // tp, self.context.rank % tp == 0)

    def generate(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """See Engine: samples of all requests are decoded together, each leaves when it is finished. Closing the iterator drops the rest.

        A sample ends with `length` at `max_new_tokens` or at `max_model_len`. Raises DataError for a prompt that leaves no room.
        """
        core, room = self._core, self._core.max_model_len
        open_: dict[str, tuple[int, int]] = {}
        for request in requests:
            if not 0 < len(request.tokens) < room:
                raise DataError(
                    f"prompt {request.id}: {len(request.tokens)} tokens + at least 1 new one must be 2 to engine.max_model_len {room}; "
                    "raise that, or shorten or drop the prompt"
                )
        gc.freeze()  # what is alive now need not be searched for garbage at every few thousand tokens
        try:
            for request in requests:
                s, tokens = request.sampling, list(request.tokens)
                stops = () if s.ignore_eos else (*self.ends, *s.stop_ids)
                params = core.params(max_tokens=min(s.max_new_tokens, room - len(tokens)), stop_ids=stops)
                kind = (s.temperature, s.top_p, s.top_k)
                for index, seed in enumerate(request.seeds):
                    key = f"{request.id}:{index}"
                    open_[key] = request.id, index
                    core.add(key, tokens, params, seed=seed, kind=kind)
            while open_:
                for done in core.step(self.version):
                    yield Sample(*open_.pop(done.key), done.tokens, done.log_probs, done.versions, done.finish)
        finally:
            gc.unfreeze()
            if open_:
                core.abort(list(open_))

    def shards(self) -> list[Shard]:
        """Views of vLLM's own storage; empty for an architecture that takes weights by `load_weights` only."""
        return self._weights.shards()

    def adopt(self, shards: Sequence[Shard]) -> bool:
        """See Engine. False where the parts of a fused weight do not lie together, or CUDA graphs have captured the addresses."""
        from jackfield_vllm.weights import bind

        weights = self._weights
        bound = bind(weights.entries, shards, weights.tensors)
        if bound is None:
            return False
        moved = any(new.data_ptr() != old.data_ptr() for new, old in zip(bound, weights.tensors, strict=True))
        if moved and self.context.device.type == "cuda" and self.config.cuda_graphs:
            return False
        weights.rebind(bound)
        return True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See Engine: vLLM's own loading of a checkpoint's tensors by their Hugging Face names."""
        self._weights.expose()
        self._core.model.load_weights(weights)

    def weights_updated(self, version: int) -> None:
        """See Engine: repack what vLLM keeps packed, drop the prefix cache; samples in flight are read again under the new weights."""
        self._weights.repack()
        self._core.drop_caches()
        self.version = version

    def sleep(self) -> int:
        """See Engine."""
        return self._core.release_kv_cache()

    def wake(self) -> int:
        """See Engine."""
        return self._core.restore_kv_cache()


def end_ids(folder: Path) -> tuple[int, ...]:
    """The model's own end tokens, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()
