"""Generation by real vLLM on CPU, with the trainer's weights as its own."""

import functools
import random

import numpy as np
import pytest
import torch

from jackfield.components import Request
from jackfield.config import SamplingConfig
from jackfield.errors import DataError
from jackfield.testing.samples import gap, generate, prompts, requests, tokens

pytestmark = pytest.mark.vllm


def test_settings_may_differ_within_a_batch(served):
    engine, backend = served
    text = prompts(1)[0]
    kinds = [SamplingConfig(max_new_tokens=n, temperature=t, top_p=p, ignore_eos=True) for n, t, p in ((3, 0, 1), (9, 1, 1), (5, 0.7, 0.5))]
    found = generate(engine, [Request(i, text, (3,), kind) for i, kind in enumerate(kinds)])
    for i, kind in enumerate(kinds):
        request = Request(i, text, (3,), kind)
        assert len(found[i, 0].tokens) == kind.max_new_tokens
        assert found[i, 0].tokens == generate(engine, [request])[i, 0].tokens
        assert gap(backend, [request], found).max() < 1e-4


def test_samples_leave_as_they_finish_and_closing_drops_the_rest(served):
    engine, _ = served
    text = prompts(1)[0]
    lengths = {0: 40, 1: 2, 2: 10}
    asked = [Request(i, text, (i,), SamplingConfig(max_new_tokens=n, ignore_eos=True)) for i, n in lengths.items()]
    assert [s.request_id for s in engine.generate(asked)] == [1, 2, 0]
    stream = engine.generate(asked)
    assert next(stream).request_id == 1
    stream.close()
    assert not engine.core.table.seeds
    assert len(generate(engine, asked)) == 3


def test_a_sample_is_cut_at_the_longest_sequence_and_a_prompt_must_leave_room(served):
    engine, _ = served
    room = engine.core.max_model_len
    sample = generate(engine, requests(prompts(1, length=room - 3), group=1, ignore_eos=True))[0, 0]
    assert (len(sample.tokens), sample.finish_reason) == (3, "length")
    for length in (0, room):
        with pytest.raises(DataError, match=f"{length} tokens .* engine.max_model_len {room}"):
            generate(engine, requests([tuple([5] * length)]))


def test_a_groups_prompt_is_computed_once(served):
    engine, _ = served
    engine.weights_updated(engine.version)
    counts = []
    engine.core.count_scheduled(counts.append)
    block, length, group, new = engine.core.block_size, 160, 8, 4
    generate(engine, requests(prompts(2, length=length), group=group, max_new_tokens=new, ignore_eos=True))
    shared = (length - 1) // block * block
    assert sum(counts) == 2 * (length + (group - 1) * (length - shared) + group * (new - 1))
    assert sum(counts) < 0.5 * 2 * group * length


def test_the_processs_random_numbers_stay_as_they_are(served):
    engine, _ = served
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    generate(engine, requests(prompts(2)))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert (np.random.get_state()[1] == state[2]).all()


def test_more_samples_than_fit_at_once_are_all_finished(served):
    """64 sequences at a time and a cache of 64 MiB: vLLM queues some and takes some back, and nothing shows."""
    engine, backend = served
    asked = requests(prompts(12, length=100), group=12, max_new_tokens=60, ignore_eos=True)
    found = generate(engine, asked)
    assert len(found) == 144
    some = [r for r in asked if r.id in (0, 11)]
    assert tokens(generate(engine, some)) == {k: v for k, v in tokens(found).items() if k[0] in (0, 11)}
    assert gap(backend, some, found).max() < 1e-4


def test_sleep_gives_the_caches_memory_and_wake_takes_it_back(served):
    engine, _ = served
    asked = requests(prompts(3, length=80), ignore_eos=True)
    before = tokens(generate(engine, asked))
    freed = engine.sleep()
    assert freed > 2**25
    assert all(t.untyped_storage().nbytes() == 0 for t in engine.core.kv_caches())
    assert engine.wake() == freed
    assert sum(t.untyped_storage().nbytes() for t in engine.core.kv_caches()) == freed
    assert tokens(generate(engine, asked)) == before


def test_norms_use_the_kernel_that_vllm_leaves_to_other_platforms(served):
    """On a CPU the model's norms are replaced, with and without a residual, and mean the same."""
    engine, _ = served
    norms = [m for m in engine.core.model.modules() if type(m).__name__ == "RMSNorm"]
    x, residual = torch.randn(5, 128), torch.randn(5, 128)
    assert norms
    for norm in norms:
        assert isinstance(norm._forward_method, functools.partial)
        want = norm.forward_native(x.clone()), *norm.forward_native(x.clone(), residual.clone())
        torch.testing.assert_close((norm(x.clone()), *norm(x.clone(), residual.clone())), want, rtol=1e-5, atol=1e-5)
        apart = torch.randn(5, 3, 256)[:, 1:, :128]  # as Qwen3's queries lie
        torch.testing.assert_close(norm(apart), norm.forward_native(apart), rtol=1e-5, atol=1e-5)
