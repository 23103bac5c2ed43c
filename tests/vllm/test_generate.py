"""Generation by real vLLM on CPU, with the trainer's weights as its own."""

import random

import numpy as np
import pytest
import torch
from vllm_helpers import batch_of, gap, generate, prompts, requests, tokens

from jackfield.components import Request
from jackfield.config import SamplingConfig
from jackfield.errors import DataError

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("settings", [(0.5, 1.0, 0), (1.0, 1.0, 0), (1.3, 1.0, 0), (1.0, 0.9, 0), (0.8, 0.7, 20), (0.0, 1.0, 0)])
def test_law_11_log_probs_are_the_trainers_under_the_sampling_distribution(served, settings):
    engine, backend = served
    temperature, top_p, top_k = settings
    asked = requests(prompts(6), temperature=temperature, top_p=top_p, top_k=top_k, ignore_eos=True)
    difference = gap(backend, asked, generate(engine, asked))
    assert len(difference) == 6 * 2 * 16
    assert difference.max() < 1e-4


def test_law_10_ends(served, llama):
    engine, _ = served
    free = generate(engine, requests(prompts(4), group=4, max_new_tokens=24, ignore_eos=True))
    assert {(len(s.tokens), s.finish_reason) for s in free.values()} == {(24, "length")}
    common = max({t for s in free.values() for t in s.tokens[2:20]}, key=lambda t: sum(t in s.tokens for s in free.values()))
    stopped = generate(engine, requests(prompts(4), group=4, max_new_tokens=24, stop_ids=(common,)))
    for key, sample in stopped.items():
        whole = free[key].tokens
        at = min(whole.index(t) if t in whole else 24 for t in (common, engine.ends[0]))
        assert sample.tokens == whole[: at + 1]
        assert sample.finish_reason == ("stop" if at < 24 else "length")
        assert len(sample.log_probs) == len(sample.versions) == len(sample.tokens)
    assert any(s.finish_reason == "stop" for s in stopped.values())


def test_the_models_own_end_tokens_stop(served):
    engine, _ = served
    free = generate(engine, requests(prompts(1), group=1, max_new_tokens=24, ignore_eos=True))[0, 0].tokens
    ends, engine.ends = engine.ends, (free[5], 7)
    try:
        sample = generate(engine, requests(prompts(1), group=1, max_new_tokens=24))[0, 0]
    finally:
        engine.ends = ends
    assert (sample.tokens, sample.finish_reason) == (free[: free.index(free[5]) + 1], "stop")


def test_law_18_each_seed_gives_one_sample_whatever_else_is_in_the_batch(served):
    engine, _ = served
    asked = requests(prompts(8), group=4, ignore_eos=True)
    together = tokens(generate(engine, asked))
    assert len({tuple(t) for t in together.values()}) == 32
    assert tokens(generate(engine, asked[::-1])) == together
    for request in asked[:2]:
        for index, seed in enumerate(request.seeds):
            alone = generate(engine, [Request(5, request.tokens, (seed,), request.sampling)])
            assert alone[5, 0].tokens == together[request.id, index]
    other = requests(prompts(8), group=4, seed=1, ignore_eos=True)
    assert tokens(generate(engine, other)) != together


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


def test_batches_that_are_trained_on_have_every_token_once(served):
    engine, _ = served
    asked = requests(prompts(3), group=3)
    batch = batch_of(asked, generate(engine, asked))
    assert batch.sample_ids.tolist() == list(range(9))
    assert ((batch.versions >= 0) == batch.response_mask).all()
