"""From our settings to vLLM's EngineArgs: the tuned defaults, and the memory's arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jackfield.errors import ConfigError, DataError
from jackfield_vllm.loader import FORMAT
from jackfield_vllm.memory import GIB, Need, kv_budget

if TYPE_CHECKING:
    from jackfield.components import WorkerContext
    from jackfield_vllm.engine import VLLMConfig

CPU_RESERVE = GIB // 2
"""Activations of a step on CPU, roughly: they are not measured there."""


def engine_arguments(config: VLLMConfig, path: Path, context: WorkerContext) -> dict[str, Any]:
    """Keyword arguments of EngineArgs. Raises ConfigError where memory does not suffice, DataError without a config.json."""
    cuda = context.device.type == "cuda"
    dtype = context.dtype if config.dtype == "auto" else config.dtype
    need = memory_need(config, path, torch.bfloat16 if dtype == "bfloat16" else torch.float32, cuda)
    share = config.memory or (0.5 if cuda else 0.1)
    free, total = torch.cuda.mem_get_info(context.device) if cuda else _ram()
    budget = kv_budget(share, total, free, need)
    sequences = config.max_num_seqs or (1024 if cuda else 256)
    arguments: dict[str, Any] = {
        "model": str(path),
        "load_format": FORMAT,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": context.seed % 2**31,
        "tensor_parallel_size": config.tp,
        "max_model_len": need.max_model_len,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(config.max_num_batched_tokens or (16384 if cuda else 8192), sequences),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enforce_eager": not (cuda and config.cuda_graphs),
        "block_size": config.block_size or (16 if cuda else 32),
        "generation_config": "vllm",
    }
    if context.world_size > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    if cuda:
        arguments |= {"gpu_memory_utilization": share, "enable_sleep_mode": True, "cudagraph_capture_sizes": capture_sizes(sequences)}
    else:
        arguments["kv_cache_memory_bytes"] = budget
    return arguments | config.args


def capture_sizes(sequences: int) -> list[int]:
    """Batch sizes to capture: up to the most samples decoded at once, each at most an eighth above the last, to bound the padding."""
    sizes = {1, 2, 4, *range(8, 129, 8), *range(160, 513, 32), *range(576, 1025, 64), *range(1152, sequences + 1, 128)}
    return sorted({size for size in sizes if size < sequences} | {sequences})


def memory_need(config: VLLMConfig, path: Path, dtype: torch.dtype, cuda: bool) -> Need:
    """Bytes from the model's config alone. Raises DataError where it cannot be read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        hf = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(hf).parameters())
    except (OSError, ValueError) as error:
        raise DataError(f"model {path}: no usable config.json: {str(error).splitlines()[0]}") from error
    heads = hf.num_attention_heads
    kv_heads = getattr(hf, "num_key_value_heads", None) or heads
    if heads % config.tp:
        raise ConfigError(f"engine.tp {config.tp} must divide the model's {heads} attention heads")
    head_size = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    if not cuda:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        known = CPUAttentionBackend.get_supported_head_sizes()
        if head_size not in known:
            raise ConfigError(
                f"engine vllm: heads of size {head_size} (hidden_size {hf.hidden_size} / {heads} heads): vLLM on CPU has attention for "
                f"{', '.join(map(str, known))} only; use engine hf, or a model with such heads"
            )
    limit = int(hf.max_position_embeddings)
    length = config.max_model_len or limit
    if length > limit:
        raise ConfigError(f"engine.max_model_len {length} is more than the model's max_position_embeddings {limit}")
    token = 2 * hf.num_hidden_layers * max(kv_heads // config.tp, 1) * head_size * dtype.itemsize
    sequences = config.max_num_seqs or (1024 if cuda else 256)
    logits = sequences * hf.vocab_size * 12
    return Need(parameters * dtype.itemsize // config.tp, token, logits if cuda else CPU_RESERVE, length)


def _ram() -> tuple[int, int]:
    """Free and total bytes of main memory, within the control group's limit where there is one."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
        used = Path("/sys/fs/cgroup/memory.current")
        free = min(free, total - int(used.read_text())) if used.is_file() else free
    return free, total
