"""One storage for trainer and engine: what is shared, what an optimizer step costs, and what the engine serves afterwards."""

import pytest
import torch

from jackfield.components import LossSums, OutputRequest
from jackfield.errors import ConfigError
from jackfield.testing.samples import batch_of, gap, generate, prompts, requests, tokens
from jackfield_reshard.adapters import apart

pytestmark = pytest.mark.vllm


class Likelihood:
    """Minus the log-likelihood of the batch: any loss will do."""

    request = OutputRequest()

    def __call__(self, outputs, batch):
        return -(outputs.log_probs * batch.loss_mask).sum() / 10, LossSums()


def train(backend, asked, samples):
    backend.forward_backward([batch_of(asked, samples)], Likelihood())
    assert backend.optimizer_step()["grad_norm"] > 0


def same(one, other):
    assert tokens(one) == tokens(other)
    assert {k: s.log_probs for k, s in one.items()} == {k: s.log_probs for k, s in other.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_zero_copy_optimizer_steps_are_served_without_a_transfer(family, small, build, trainer, connect, tmp_path):
    folder = small(tmp_path / "model", family, tied=family == "llama")
    engine, backend = build(folder), trainer(folder)
    transport = connect(backend, engine, "alias")
    asked = requests(prompts(4, length=70, shared=64), ignore_eos=True)
    size = sum(p.nbytes for p in backend.model.parameters())
    copy = build(folder)
    other = connect(backend, copy, "local")
    seen = []
    for version in range(4):
        report = transport.sync(version)
        assert (report.bytes_aliased, report.bytes_copied, report.bytes_sent) == (size, 0, 0)
        assert {s.tensor.data_ptr() for s in engine.shards()} == {p.data_ptr() for p in backend.model.parameters()}
        found = generate(engine, asked)
        assert {v for s in found.values() for v in s.versions} == {version}
        assert gap(backend, asked, found).max() < 1e-4
        other.sync(version)
        same(found, generate(copy, asked))
        seen.append(tokens(found))
        if version < 3:
            train(backend, asked, found)
    assert len({str(t) for t in seen}) == 4
    cold = build(folder)
    connect(backend, cold, "local").sync(3)
    same(generate(cold, asked), found)


def test_adapters_are_merged_in_place(small, build, trainer, connect, tmp_path):
    """In one process into shared storage, so that nothing moves; where only adapters arrive, on the engine's side: the same to the bit."""
    folder = small(tmp_path / "model", "qwen2")
    engine, backend = build(folder), trainer(folder, lora={"r": 4})
    transport = connect(backend, engine, "alias")
    size = sum(s.tensor.nbytes for s in backend.shards())
    elsewhere = build(folder)
    source, merging, factors = apart(trainer(folder, lora={"r": 4}), elsewhere, 1, None, torch.device("cpu"))
    other = connect(source, merging, "p2p")
    asked = requests(prompts(4, length=70, shared=64), ignore_eos=True)
    seen = []
    for version in range(3):
        report = transport.sync(version)
        assert (report.bytes_aliased, report.bytes_copied, report.bytes_sent) == (size, 0, 0)
        found = generate(engine, asked)
        assert gap(backend, asked, found).max() < 1e-4
        other.sync(version)
        assert len(factors) == 2 * 7 * 2
        same(found, generate(elsewhere, asked))
        seen.append(tokens(found))
        for side in (backend, source.backend):
            train(side, asked, found)
    assert len({str(t) for t in seen}) == 3


def test_an_engine_moves_into_storage_that_lies_as_vllm_lays_it(llama, served, build):
    engine, _ = served
    asked = requests(prompts(3))
    second = build(llama)
    assert second.adopt(engine.shards())
    second.weights_updated(0)
    assert [s.tensor.data_ptr() for s in second.shards()] == [s.tensor.data_ptr() for s in engine.shards()]
    same(generate(second, asked), generate(engine, asked))


def test_scattered_storage_is_refused_and_changes_nothing(llama, served, trainer, build):
    engine, _ = served
    asked = requests(prompts(3))
    before = generate(engine, asked)
    by_name = {s.name: s for s in trainer(llama).shards()}
    scattered = [by_name[s.name] for s in engine.shards()]
    assert not engine.adopt(scattered)
    same(generate(engine, asked), before)

    from jackfield_vllm.loader import on_storage

    with pytest.raises(ConfigError, match="not laid out as vLLM's"), on_storage(scattered):
        build(llama)


def test_the_loader_builds_a_model_on_given_storage(llama, served, build):
    from jackfield_vllm.loader import on_storage

    engine, _ = served
    with on_storage(engine.shards()):
        second = build(llama)
    assert [s.tensor.data_ptr() for s in second.shards()] == [s.tensor.data_ptr() for s in engine.shards()]
    asked = requests(prompts(3))
    same(generate(second, asked), generate(engine, asked))


def test_vllm_finds_the_loader_in_its_own_plugin_group():
    from importlib.metadata import entry_points

    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    (found,) = entry_points(group="vllm.general_plugins", name="jackfield")
    found.load()()
    assert type(get_model_loader(LoadConfig(load_format="jackfield"))).__name__ == "JackfieldLoader"


def test_other_architectures_load_by_name(tmp_path, build, trainer, connect):
    """StableLM is not in our tables."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.StableLmConfig(
        **sizes,
        num_key_value_heads=2,
        partial_rotary_factor=1.0,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for linear in ("shared", "packed"):
        engine, backend = build(tmp_path, cpu_linear=linear), trainer(tmp_path)
        transport = connect(backend, engine)
        assert engine.shards() == []
        asked = requests(prompts(3), ignore_eos=True)
        for version in range(2):
            report = transport.sync(version)
            assert report.bytes_copied == sum(p.nbytes for p in backend.model.parameters())
            found = generate(engine, asked)
            assert gap(backend, asked, found).max() < 1e-4
            train(backend, asked, found)
        with pytest.raises(AssertionError):
            assert gap(backend, asked, found).max() < 1e-4


def test_an_update_in_the_middle_of_a_sample(served):
    """Running samples are read again under the new weights; each token says which version it is from."""
    engine, backend = served
    asked = requests(prompts(2), group=1, max_new_tokens=20, ignore_eos=True) + [
        type(r)(r.id + 2, r.tokens, r.seeds, r.sampling.model_copy(update={"max_new_tokens": 4}))
        for r in requests(prompts(2), group=1, ignore_eos=True)
    ]
    old = [s.tensor.clone() for s in engine.shards()]
    stream = engine.generate(asked)
    first = next(stream)
    engine_version = engine.version
    try:
        for shard in engine.shards():
            shard.tensor.mul_(0.7)
        engine.weights_updated(engine_version + 1)
        rest = {s.request_id: s for s in [first, *stream]}
        assert set(rest) == {0, 1, 2, 3}
        for i in (0, 1):
            sample = rest[i]
            assert sample.versions == sorted(sample.versions)
            assert set(sample.versions) == {engine_version, engine_version + 1}
            changed = sample.versions.index(engine_version + 1)
            scored = backend.forward([batch_of(asked[i : i + 1], {(i, 0): sample})], OutputRequest())[0].log_probs[0]
            new = scored[len(asked[i].tokens) + changed :] - torch.tensor(sample.log_probs[changed:])
            assert new.abs().max() < 1e-4
            assert (scored[len(asked[i].tokens) :][:changed] - torch.tensor(sample.log_probs[:changed])).abs().max() > 1e-3
    finally:
        for shard, tensor in zip(engine.shards(), old, strict=True):
            shard.tensor.copy_(tensor)
        engine.weights_updated(engine_version)
