"""Engine `hf`: what the conformance kit cannot know. Slots, shared prompts, the sampler, architectures with an attention of their own."""

import pytest
import torch

from jackfield.components import Request, WorkerContext
from jackfield.config import ModelConfig, SamplingConfig
from jackfield.errors import DataError
from jackfield.testing.models import tiny_model
from jackfield_hf.engine import HFConfig, HFEngine
from jackfield_hf.sampling import Uniforms, pick
from jackfield_torch.backend import TorchBackend


def build(folder, **options):
    context = WorkerContext("policy", torch.device("cpu"), 0)
    backend = TorchBackend()
    backend.setup(ModelConfig(path=str(folder)), None, context)
    engine = HFEngine(HFConfig(**options))
    engine.setup(ModelConfig(path=str(folder)), context)
    assert engine.adopt(backend.shards())
    engine.weights_updated(0)
    return engine, backend


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return build(tiny_model(tmp_path_factory.mktemp("model")))


def count_tokens(engine):
    """Shapes of the model's inputs from now on."""
    shapes = []
    engine.model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def test_weights_are_shared(pair):
    engine, backend = pair
    theirs = {s.name: s.tensor.data_ptr() for s in backend.shards()}
    assert {s.name: s.tensor.data_ptr() for s in engine.shards()} == theirs


def test_a_groups_prompt_is_read_once_and_finished_rows_leave(tmp_path):
    engine, _ = build(tiny_model(tmp_path))
    sampling = SamplingConfig(max_new_tokens=9, ignore_eos=True)
    list(engine.generate([Request(0, (5,), (0,), sampling)]))
    shapes = count_tokens(engine)
    short, long = SamplingConfig(max_new_tokens=3, ignore_eos=True), sampling
    list(engine.generate([Request(0, (5, 6, 7), tuple(range(8)), short), Request(1, (8, 9), tuple(range(4)), long)]))
    assert shapes == [(2, 3), (12, 1), (12, 1), *[(4, 1)] * 6]


def test_waiting_samples_take_freed_slots(tmp_path):
    engine, _ = build(tiny_model(tmp_path), max_batch=4)
    requests = [Request(i, (5,) * (i + 1), (i,), SamplingConfig(max_new_tokens=3 + 4 * (i % 2), ignore_eos=True)) for i in range(8)]
    shapes = count_tokens(engine)
    order = [s.request_id for s in engine.generate(requests)]
    assert sorted(order) == list(range(8))
    assert order != sorted(order, reverse=True)
    assert max(rows for rows, tokens in shapes if tokens == 1) == 4
    assert engine.cache.rows == 4


def test_samples_come_as_they_finish(pair):
    engine, _ = pair
    requests = [Request(i, (5, 6), (i,), SamplingConfig(max_new_tokens=n, ignore_eos=True)) for i, n in enumerate((30, 2))]
    stream = engine.generate(requests)
    assert next(stream).request_id == 1
    assert next(stream).request_id == 0


def test_new_weights_during_generation(tmp_path):
    """The rest of a running sample comes from the new weights, its own tokens read again under them, and says so."""
    engine, backend = build(tiny_model(tmp_path))
    requests = [Request(0, (5, 6), (1,), SamplingConfig(max_new_tokens=2, ignore_eos=True))]
    requests.append(Request(1, (7, 8, 9), (2,), SamplingConfig(max_new_tokens=8, ignore_eos=True, temperature=0)))
    stream = engine.generate(requests)
    assert next(stream).versions == [0, 0]
    for shard in backend.shards():
        shard.tensor.mul_(1.5)
    engine.weights_updated(1)
    sample = next(stream)
    assert sample.versions == [0, 0, *[1] * 6]
    for cut in range(2, 8):
        greedy = SamplingConfig(max_new_tokens=1, temperature=0, ignore_eos=True)
        (fresh,) = engine.generate([Request(0, (7, 8, 9, *sample.tokens[:cut]), (0,), greedy)])
        assert fresh.tokens == [sample.tokens[cut]]
        assert fresh.log_probs[0] == pytest.approx(sample.log_probs[cut], abs=1e-4)


def test_the_context_ends_a_sample(tmp_path):
    engine, _ = build(tiny_model(tmp_path, max_positions=16))
    (sample,) = engine.generate([Request(0, (5,) * 10, (0,), SamplingConfig(max_new_tokens=50, ignore_eos=True))])
    assert (len(sample.tokens), sample.finish_reason) == (6, "length")
    with pytest.raises(DataError, match=r"prompt 4: 16 tokens \+ at least 1 new one do not fit into the context of 16"):
        list(engine.generate([Request(4, (5,) * 16, (0,), SamplingConfig())]))
    with pytest.raises(DataError, match="prompt 3: no tokens"):
        list(engine.generate([Request(3, (), (0,), SamplingConfig())]))


def test_mixed_sampling_in_one_batch(pair):
    """Rows with settings of their own get what they would get alone."""
    engine, _ = pair
    kinds = [
        SamplingConfig(temperature=t, top_p=p, top_k=k, max_new_tokens=6) for t, p, k in ((1, 1, 0), (0, 1, 0), (0.7, 0.8, 0), (1, 1, 3))
    ]
    requests = [Request(i, (5, 6 + i), (3,), s) for i, s in enumerate(kinds)]
    together = {s.request_id: s.tokens for s in engine.generate(requests)}
    assert together == {r.id: next(engine.generate([r])).tokens for r in requests}


def test_an_attention_of_its_own_is_noticed(tmp_path):
    """Gemma 2 caps attention scores: the engine says that it is slow, and is right."""
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine, _ = build(tmp_path)
    (sample,) = engine.generate([Request(0, (5, 6, 7), (0,), SamplingConfig(temperature=0, max_new_tokens=5, ignore_eos=True))])
    assert engine.mode == "recompute"
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        assert sample.tokens == plain(input_ids=torch.tensor([[5, 6, 7, *sample.tokens]])).logits[0, 2:-1].argmax(-1).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_every_family_has_a_cache(tmp_path, family):
    engine, _ = build(tiny_model(tmp_path, family))
    list(engine.generate([Request(0, (5,), (0,), SamplingConfig(max_new_tokens=1))]))
    assert (engine.mode, engine.plain_head) == ("slots", True)


def test_a_sliding_window(tmp_path):
    """Tokens outside the window are not attended, when prompts are read and after."""
    folder = tiny_model(tmp_path, "mixtral", sliding_window=4)
    engine, _ = build(folder)
    (sample,) = engine.generate([Request(0, tuple(range(5, 15)), (0,), SamplingConfig(temperature=0, max_new_tokens=8, ignore_eos=True))])
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[*range(5, 15), *sample.tokens]])).logits[0, 9:-1]
    assert sample.tokens == logits.argmax(-1).tolist()


def test_sleep_frees_the_cache(pair):
    engine, _ = pair
    list(engine.generate([Request(0, (5,), (0,), SamplingConfig(max_new_tokens=4))]))
    assert engine.sleep() > 0
    assert engine.sleep() == 0
    assert len(list(engine.generate([Request(0, (5,), (0,), SamplingConfig(max_new_tokens=4))]))) == 1


def test_the_sampler_inverts_the_distribution():
    """Against a plain running sum in float64, at vocabularies around the block size; zero probabilities are never picked."""
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (3, 255, 256, 257, 1000):
        p = (
            torch.randn(500, vocabulary, generator=generator)
            .mul_(3)
            .masked_fill_(torch.rand(500, vocabulary, generator=generator) < 0.5, -torch.inf)
        )
        p[:, 1] = 0
        p = p.softmax(-1)
        u = torch.rand(500, generator=generator, dtype=torch.float64)
        u[:2] = torch.tensor([0.0, 1 - 2**-53])
        got = pick(p, u)
        cdf = p.double().cumsum(-1)
        below = torch.where(got > 0, cdf.gather(1, (got - 1).clamp(min=0)[:, None])[:, 0], 0)
        above = cdf.gather(1, got[:, None])[:, 0]
        x = u * cdf[:, -1]
        assert (p.gather(1, got[:, None]) > 0).all()
        assert ((below - 1e-6 <= x) & (x <= above + 1e-6)).all()


def test_a_seed_is_a_stream():
    one, two = Uniforms(5), Uniforms(5)
    numbers = [next(one) for _ in range(200)]
    assert numbers == [next(two) for _ in range(200)]
    assert len(set(numbers)) == 200
    assert abs(sum(numbers) / 200 - 0.5) < 0.1
