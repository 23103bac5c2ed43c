"""The families' tables say what real backends and engines emit, and real backends' weights reach an engine's layout."""

import json

import pytest
import reshard_fakes as fakes
import torch

from jackfield import registry
from jackfield.components import WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, OptimizerConfig
from jackfield.testing.models import tiny_model
from jackfield_reshard.canonical import align
from jackfield_reshard.families import read_config, tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import materialise
from jackfield_reshard.modules import module_shards
from jackfield_reshard.sides import shards
from jackfield_reshard.transports import Auto

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"]


def elements(pieces):
    """Every element of each rank by name: what is held, however it is cut into boxes."""
    out = {}
    for piece in pieces:
        mask = out.setdefault((piece.name, piece.shape), torch.zeros(piece.shape, dtype=torch.bool))
        mask[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))] = True
    return out


def same(emitted, table, layout, rank, dtype="float32"):
    """The table's shards of a rank and the emitted ones hold the same elements of the same tensors, in the same types."""
    expected = shards(table, layout, rank, dtype)
    (mine,), (theirs,) = align([emitted], [expected])
    held, wanted = elements(mine), elements(theirs)
    assert held.keys() == wanted.keys()
    for key, mask in wanted.items():
        assert torch.equal(held[key], mask), f"rank {rank} {key}"
    types = {p.name: (p.dtype, emitted[p.shard].buffer) for p in mine}
    assert types == {p.name: (p.dtype, expected[p.shard].buffer) for p in theirs}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
def test_transformers(family, tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 4 if family == "deepseek_v3" else 2, "tie_word_embeddings": tied, "pad_token_id": None}
    if family == "deepseek_v3":
        settings |= {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
        settings |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
    elif "moe" in family or family == "mixtral":
        settings |= {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    if family.startswith("qwen3"):
        settings["head_dim"] = 8
    config = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    same(module_shards(model), tensors(json.loads(config.to_json_string(use_diff=False))), Layout("torch"), 0)


def perturbed(backend):
    """Change one element of every tensor, as law 23 asks."""
    with torch.no_grad():
        for s in backend.shards():
            s.tensor.view(-1)[0] += 1 if s.tensor.is_contiguous() else 0


def arrives(backend, layout, table, rank, world):
    """Connect to an engine of the given layout; its weights are then compared through the transport's own checksums and by name."""
    device = fakes.place(rank)
    engine = fakes.FakeEngine(materialise(table, layout, rank, None, device=str(device)))
    link = Auto(Auto.Config(verify=True, bucket_bytes=1 << 14))
    link.connect(backend, engine, WorkerContext("policy", device, 0, rank, world))
    report = link.sync(0)
    assert link.agreement.plan.prove().errors == ()
    perturbed(backend)
    link.sync(1)
    held = [(s.name, s.shape, s.offset, s.size, s.tensor.cpu().clone()) for s in engine.shards()]
    return report, held, [(s.name, s.shape, s.offset, s.size, s.tensor.cpu().clone()) for s in backend.shards()]


@pytest.mark.parametrize("family,options", [("qwen2", {"tied": True, "vocab": 65}), ("qwen3", {})])
def test_fsdp_with_tensor_parallelism(ranks, tmp_path, family, options):
    """Real shards of dp 2 x tp 2 agree with the table, and reach an engine of tp 4 bit for bit."""
    folder = tiny_model(tmp_path / "model", family, kv_heads=4, **options)
    table, train, serve = tensors(read_config(folder)), Layout("fsdp", tp=2, dp=2), Layout("vllm", tp=4, vocabulary_multiple=64)

    def body(rank, world):
        backend = registry.build("backend", ComponentSpec(name="fsdp", options={"tp": 2}))
        backend.setup(ModelConfig(path=str(folder)), None, WorkerContext("policy", CPU, 0, rank, world))
        same(backend.shards(), table, train, rank)
        return arrives(backend, serve, table, rank, world)[0].bytes_sent

    assert all(sent > 0 for sent in ranks(4, body))


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    "family,options,train,serve",
    [
        ("llama", {"tp": 2, "pp": 2}, Layout("megatron", tp=2, pp=2), Layout("vllm", tp=2, dp=2)),
        ("qwen2", {"tp": 2, "pp": 2}, Layout("megatron", tp=2, pp=2), Layout("vllm", tp=4)),
        ("qwen3", {"pp": 2, "vpp": 2}, Layout("megatron", pp=2, vpp=2, dp=2), Layout("vllm", dp=4)),
        ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}, Layout("megatron", tp=2, pp=2, ep=2, etp=1), Layout("vllm", tp=2, dp=2, ep=2)),
        ("mixtral", {"ep": 2, "pp": 2}, Layout("megatron", pp=2, dp=2, ep=2), Layout("vllm", tp=2, dp=2)),
    ],
    ids=lambda value: str(value) if isinstance(value, str | Layout) else "",
)
def test_megatron(ranks, tmp_path, family, options, train, serve):
    """Megatron's real shards agree with the table, and reach vLLM's layouts bit for bit, tied embeddings included."""
    pytest.importorskip("megatron.core")
    from jackfield_megatron import shim

    with shim.scope():
        import jackfield_megatron.model
        import jackfield_megatron.update  # noqa: F401
    from jackfield_megatron.backend import MegatronBackend

    folder = tiny_model(tmp_path / "model", family, layers=4, tied=family == "qwen2", vocab=62)
    table = tensors(read_config(folder))

    def body(rank, world):
        backend = MegatronBackend(MegatronBackend.Config(**options, distributed_optimizer=False))
        backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(), WorkerContext("policy", fakes.place(rank), 0, rank, world))
        same(backend.shards(), table, train, rank)
        return arrives(backend, serve, table, rank, world)

    results = ranks(4, body)
    full = {}
    for _, _, backend in results:
        (pieces,), _ = align([[_shard(*row) for row in backend]], [])
        for piece in pieces:
            whole = full.setdefault(piece.name, torch.full(piece.shape, float("nan")).reshape(-1))
            view = whole.view(piece.shape)[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))]
            view.copy_(piece.view(backend[piece.shard][4]))
    for _, engine, _ in results:
        (pieces,), _ = align([[_shard(*row) for row in engine]], [])
        for piece in pieces:
            whole = full[piece.name].view(piece.shape)
            want = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))]
            assert torch.equal(piece.view(engine[piece.shard][4]), want), piece.name


def _shard(name, shape, offset, size, tensor):
    return fakes.shard(name, tensor, shape, offset)


@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_vllm(ranks, tmp_path, family):
    """vLLM's real shards agree with the table; Megatron without tensor parallelism shares every byte with it."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("vllm")
    from jackfield import registry
    from jackfield.config import ComponentSpec

    folder = tiny_model(tmp_path / "model", family, hidden=128, vocab=64, max_positions=512)
    table = tensors(read_config(folder))

    def body(rank, world):
        context = WorkerContext("policy", CPU, 0)
        options = {"memory": 0.06, "max_num_seqs": 8, "args": {"kv_cache_memory_bytes": 2**25}}
        engine = registry.build("engine", ComponentSpec(name="vllm", options=options))
        engine.setup(ModelConfig(path=str(folder)), context)
        same(engine.shards(), table, Layout("vllm", vocabulary_multiple=64), 0)
        backend = registry.build("backend", ComponentSpec(name="megatron", options={"distributed_optimizer": False}))
        backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(), context)
        link = Auto(Auto.Config(verify=True))
        link.connect(backend, engine, context)
        report = link.sync(0)
        perturbed(backend)
        link.sync(1)
        return report

    (report,) = ranks(1, body, timeout=200)
    model = sum(4 * torch.Size(t.shape).numel() * len(t.layers) for t in table)
    assert (report.bytes_aliased, report.bytes_copied, report.bytes_sent) == (model, 0, 0)
