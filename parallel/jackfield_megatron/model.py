"""The model, built from Megatron-Core's parts and ours: embedding, transformer block, and a head that gives log-probs or values."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from jackfield.components import OutputRequest
from jackfield_megatron.attention import Geometry, RMSNorm, SelfAttention
from jackfield_megatron.config import Layout, MegatronConfig
from jackfield_megatron.families import Shape
from jackfield_megatron.logprobs import Vocabulary, statistics


def transformer_config(shape: Shape, options: MegatronConfig, layout: Layout, device: torch.device) -> TransformerConfig:
    """Megatron's configuration. Dropout is 0: reinforcement learning scores and trains the same distribution."""
    dtype = getattr(torch, options.dtype)
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.eps,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.family in ("qwen3", "qwen3_moe"),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
        # Loss and gradients are sums here, never averages: this is the setting that makes Megatron divide by nothing (law 2).
        "calculate_per_token_loss": True,
        "variable_seq_lengths": layout.pp > 1,
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": layout.vpp == 1,
        # Interleaving with batched, not overlapped communication is silently wrong at PP 2.
        "overlap_p2p_comm": layout.vpp > 1,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": options.draw_on_device,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": device.type == "cuda",
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if layout.vpp > 1:
        settings["virtual_pipeline_model_parallel_size"] = layout.vpp
    if shape.layers % (layout.pp * layout.vpp):
        settings["pipeline_model_parallel_layout"] = _uneven(layout.stages(shape.layers), layout)
    if options.activation_checkpointing:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif options.recompute_modules:
        settings |= {"recompute_granularity": "selective", "recompute_modules": list(options.recompute_modules)}
    if shape.experts:
        settings |= {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.expert_ffn,
            "moe_router_topk": shape.top_k,
            "moe_router_pre_softmax": not shape.normalize_top_k,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_layer_freq": [int(sparse) for sparse in shape.moe_layers],
            "moe_token_dispatcher_type": "alltoall",  # all-gather wants equal token counts on all ranks
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
        }
    elif layout.pp > 1:
        # Megatron refuses the default dispatcher with variable lengths, in dense models too.
        settings["moe_token_dispatcher_type"] = "alltoall"
    return TransformerConfig(**settings)


def _uneven(stages: list[int], layout: Layout) -> list[list[str]]:
    """Megatron's explicit pipeline layout, one entry for each virtual stage in model order."""
    entries = [["decoder"] * n for n in stages]
    entries[0].insert(0, "embedding")
    entries[-1].append("loss")
    return entries


def uses_transformer_engine(choice: str) -> bool:
    """Whether Transformer Engine's linear layers and norms are taken. Raises ConfigError where they are demanded and missing."""
    from jackfield_megatron.fused import transformer_engine

    return choice != "torch" and transformer_engine(required=choice == "transformer_engine")


def layer_specs(shape: Shape, config: TransformerConfig, layers: range, fused: str) -> TransformerBlockSubmodules:
    """The block's parts for the given layers of the model."""
    column, row, norm, provider = ColumnParallelLinear, RowParallelLinear, RMSNorm, LocalSpecProvider()
    if uses_transformer_engine(fused):
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

        column, row, norm = TEColumnParallelLinear, TERowParallelLinear, TENorm
    specs = []
    for index in layers:
        if shape.experts and shape.moe_layers[index]:
            mlp: Any = get_moe_module_spec_for_backend(backend=provider, num_experts=shape.experts, moe_grouped_gemm=False)
        else:
            mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
        submodules = TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(module=SelfAttention, params={"linears": (column, row), "norm": norm}),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        )
        specs.append(ModuleSpec(module=TransformerLayer, submodules=submodules))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


class VocabularyHead(ColumnParallelLinear):
    """The output layer: hidden states to log-probs, never to all logits."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, labels: Tensor, request: OutputRequest, vocabulary: Vocabulary, weight: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """`hidden` [N, H], the same on all TP ranks; see logprobs.statistics."""
        return statistics(hidden, self.weight if weight is None else weight, labels, request, vocabulary)


class ValueHead(torch.nn.Module):
    """Scalar head of a critic, replicated over TP; starts at 0."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` [N, H] to float32 [N]."""
        return torch.nn.functional.linear(hidden, self.weight).float().squeeze(-1)


class Model(LanguageModule):
    """One pipeline stage (or virtual stage) of a causal language model or critic."""

    def __init__(
        self,
        config: TransformerConfig,
        shape: Shape,
        options: MegatronConfig,
        layers: range,
        *,
        head: str,
        padded_vocab: int,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config=config)
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process, self.head = pre_process, post_process, head
        self.pad_id = shape.pad_id
        self.share_embeddings_and_output_weights = shape.tied and head == "lm"
        tp_group = parallel_state.get_tensor_model_parallel_group()
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=padded_vocab,
                max_sequence_length=shape.max_positions,
                position_embedding_type="none",
                tp_group=tp_group,
            )
        self.decoder = TransformerBlock(
            config=config,
            spec=layer_specs(shape, config, layers, options.fused),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
        if post_process and head == "lm":
            self.output_layer: Any = VocabularyHead(
                config.hidden_size,
                padded_vocab,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=pre_process and self.share_embeddings_and_output_weights,
                tp_group=tp_group,
            )
        elif post_process:
            self.output_layer = ValueHead(config)
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()
        rows = padded_vocab // tp_group.size()
        first = tp_group.rank() * rows
        self.vocabulary = Vocabulary(tp_group, first, max(0, min(rows, shape.vocab - first)), options.logits_chunk)

    def _embed(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(input_ids=tokens, position_ids=None)
        if self.pad_id is None:
            return hidden
        padding = (tokens == self.pad_id).t()
        if self.config.sequence_parallel:
            group = self.vocabulary.group
            padding = padding.chunk(group.size())[group.rank()]
        return torch.where(padding[..., None], hidden.detach(), hidden).contiguous()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Called by Megatron's schedules with what the previous stage sent."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(self, tokens: Tensor, geometry: Geometry, wanted: Tensor, labels: Tensor, request: OutputRequest) -> Any:
        """`tokens` int64 [b, s] of this context-parallel rank. The last stage returns (log_probs, entropy, sum p^2) or (values,),
        float32 [N] each, for the N positions `wanted` (indices into [s x b]) and their `labels`; others the hidden states."""
        hidden = self._embed(tokens) if self.pre_process else None
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=geometry)
        if not self.post_process:
            return hidden
        group = self.vocabulary.group
        value = self.head == "value"
        if self.config.sequence_parallel:
            # The heads' gradients: each TP rank has a part of log-probs' (summed), but the whole of values' (split).
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not value, group=group)
        elif not value:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        chosen = hidden.flatten(0, 1).index_select(0, wanted)
        if value:
            return (self.output_layer(chosen),)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(chosen, labels, request, self.vocabulary, weight=weight)


def rotary(hf_config: Any, device: torch.device) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin, by transformers' own rules for every kind of RoPE scaling."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    embedding = LlamaRotaryEmbedding(config=hf_config)
    return embedding.inv_freq.float().to(device), float(embedding.attention_scaling)
