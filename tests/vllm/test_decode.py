"""What is replaced in vLLM's decode step changes no sample, no block and no count of computed tokens."""

import pytest

from jackfield.components import Request
from jackfield.testing.samples import generate, prompts, requests

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def tight(llama, build, trainer, connect):
    """An engine whose cache holds about three of the longest samples."""
    engine = build(llama, args={"kv_cache_memory_bytes": 2**20})
    connect(trainer(llama), engine).sync(0)
    return engine


def _counted(engine, asked):
    """Samples of two rounds, the tokens that each step computed, and the blocks that are free afterwards."""
    engine.weights_updated(engine.version)
    counts, scheduler = [], engine.core._scheduler
    schedule = scheduler.schedule
    engine.core.count_scheduled(counts.append)
    found = generate(engine, asked)
    longer = [Request(r.id, (*r.tokens, *found[r.id, 0].tokens), r.seeds, r.sampling) for r in asked[:2]]
    after = generate(engine, longer)  # as many turns do: prompt and response are found in the cache
    scheduler.schedule = schedule
    samples = [{k: (s.tokens, s.log_probs) for k, s in some.items()} for some in (found, after)]
    return samples, counts, scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def test_steps_inside_a_block_ask_for_nothing(tight, monkeypatch):
    manager = tight.core._scheduler.kv_cache_manager
    asked = requests(prompts(6, length=40), group=2, max_new_tokens=100, ignore_eos=True)
    calls, allocate = [], type(manager).allocate_slots
    monkeypatch.setattr(type(manager), "allocate_slots", lambda *args, **kwargs: calls.append(1) or allocate(*args, **kwargs))
    quick = manager.allocate_slots
    samples, counts, free = _counted(tight, asked)
    shortened = len(calls)
    assert sum(counts) > 12 * (100 + 40), "no sample was dropped and read again: the cache is not tight"
    calls.clear()
    monkeypatch.delattr(manager, "allocate_slots")
    assert manager.allocate_slots is not quick
    plain = _counted(tight, asked)
    assert plain == (samples, counts, free)
    assert shortened * 8 < len(calls)


def test_a_key_that_comes_again_draws_by_its_new_seed(served):
    engine, _ = served
    text = prompts(1)[0]

    def tokens(seed):
        return generate(engine, [Request(0, text, (seed,), requests([text], max_new_tokens=8, ignore_eos=True)[0].sampling)])[0, 0].tokens

    first, second = tokens(1), tokens(2)
    assert first != second
    assert (tokens(1), tokens(2)) == (first, second)
