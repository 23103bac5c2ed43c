"""What is replaced in vLLM's decode step changes no sample, no block and no count of computed tokens."""

import dataclasses

import pytest

from jackfield.components import Request
from jackfield.config import SamplingConfig
from jackfield.testing.samples import generate, prompts, requests
from jackfield_vllm import adapter
from jackfield_vllm.adapter import FINISH
from jackfield_vllm.decode import quick_slots
from jackfield_vllm.steady import Steady

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pair(llama, build, trainer, connect):
    """Two engines whose cache holds about three of the longest samples: ours, and one that leaves everything to vLLM."""

    def engine():
        made = build(llama, args={"kv_cache_memory_bytes": 2**20})
        connect(trainer(llama), made).sync(0)
        return made

    with pytest.MonkeyPatch.context() as patch:
        ours = engine()
        patch.setattr(Steady, "suits", staticmethod(lambda scheduler, version: False))
        patch.setattr(adapter, "quick_slots", lambda scheduler: None)
        return ours, engine()


def _both(pair, monkeypatch, use):
    """Equal are what `use(engine)` gives, the tokens that each step computed and the blocks free at the end. The counts, and how many
    steps were not vLLM's own."""
    seen, made = [], []
    for engine in pair:
        engine.weights_updated(engine.version)
        counts, scheduler, steady = [], engine.core._scheduler, engine.core.steady
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "schedule", scheduler.schedule)
            engine.core.count_scheduled(counts.append)
            if steady is not None:
                patch.setattr(steady, "_make", lambda borders, make=steady._make: made.append(1) or make(borders))
            found = use(engine)
        assert not scheduler.running and not (steady and steady._flights)
        seen.append((found, counts, scheduler.kv_cache_manager.block_pool.get_num_free_blocks()))
    assert seen[0] == seen[1]
    return counts, len(made)


def _samples(found):
    return {key: (s.tokens, s.log_probs, s.finish_reason) for key, s in found.items()}


def test_samples_that_are_dropped_from_the_cache_and_read_again(pair, monkeypatch):
    asked = requests(prompts(6, length=40), group=2, max_new_tokens=100, ignore_eos=True)

    def use(engine):
        found = generate(engine, asked)
        longer = [Request(r.id, (*r.tokens, *found[r.id, 0].tokens), r.seeds, r.sampling) for r in asked[:2]]
        return _samples(found), _samples(generate(engine, longer))  # as turns do: prompt and response are found in the cache

    counts, made = _both(pair, monkeypatch, use)
    assert sum(counts) > 12 * (100 + 40), "no sample was dropped and read again: the cache is not tight"
    assert made > len(counts) / 2


def test_samples_end_at_tokens_and_lengths_of_their_own_and_at_the_longest_sequence(pair, monkeypatch):
    kinds = [SamplingConfig(max_new_tokens=n, stop_ids=(7, 8), temperature=t) for n, t in ((30, 1.0), (60, 0.7), (200, 1.3))]
    asked = [Request(i, p, (i, i + 100), kinds[i % 3]) for i, p in enumerate(prompts(4, length=24))]
    room = pair[0].core.max_model_len
    asked += [Request(9, prompts(1, length=room - 20)[0], (5,), SamplingConfig(max_new_tokens=50, ignore_eos=True))]
    reasons = set()

    def use(engine):
        found = _samples(generate(engine, asked))
        reasons.update(reason for *_, reason in found.values())
        assert len(found[9, 0][0]) == 20
        return found

    counts, made = _both(pair, monkeypatch, use)
    assert reasons == set(FINISH.values())
    assert made > len(counts) / 2


def test_samples_that_come_are_closed_or_get_new_weights_in_between(pair, monkeypatch):
    long = requests(prompts(3, length=20), group=1, max_new_tokens=80, ignore_eos=True)
    short = [Request(r.id, r.tokens, r.seeds, r.sampling.model_copy(update={"max_new_tokens": 9})) for r in requests(prompts(2), group=1)]

    def use(engine):
        stream = engine.generate([long[0], long[1], *[Request(7, r.tokens, r.seeds, r.sampling) for r in short[:1]]])
        first = next(stream)
        stream.close()
        stream = engine.generate([*long, Request(8, short[1].tokens, (3,), short[1].sampling)])
        second = next(stream)
        engine.weights_updated(engine.version)  # samples in flight are read again
        rest = list(stream)
        return [(s.request_id, s.tokens, s.log_probs) for s in (first, second, *rest)]

    counts, made = _both(pair, monkeypatch, use)
    assert made > len(counts) / 2


def _simulated(engine, ahead, steady, events):
    """What each step of a scheduler says, and what comes of it, with tokens that depend on sample and position alone; `ahead` as on a
    GPU: a step is scheduled before the tokens of the last are known. `events[n](scheduler, add)` happens before step n."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as Queued

    core, given = engine.core._client.engine_core, engine.core._scheduler
    scheduler = (AsyncScheduler if ahead else Scheduler)(
        vllm_config=given.vllm_config,
        kv_cache_config=given.kv_cache_config,
        structured_output_manager=given.structured_output_manager,
        block_size=engine.core.block_size,
        hash_block_size=engine.core.block_size,
    )
    if steady:
        assert Steady.suits(scheduler, adapter.version())
        quick_slots(scheduler)
        Steady(scheduler)
    required = EngineCoreRequest.__struct_fields__[: -len(EngineCoreRequest.__struct_defaults__)]

    def add(key, prompt, length):
        params = SamplingParams(max_tokens=length, stop_token_ids=[3], ignore_eos=True)
        fields = {"request_id": key, "prompt_token_ids": prompt, "sampling_params": params, "arrival_time": 0.0}
        asked = EngineCoreRequest(**{**dict.fromkeys(required), **fields, "external_req_id": key})
        scheduler.add_request(Queued.from_engine_core_request(asked, core.request_block_hasher))

    seen, flights, made, followed = [], [], 0, ([], [])
    for number in range(1000):
        if number in events:
            events[number](scheduler, add)
        if scheduler.has_requests():
            out = scheduler.schedule()
            flight = steady and scheduler.schedule.__self__.flight(out)
            if flight:
                made += 1
                keys, cached = [r.request_id for r in flight.requests], out.scheduled_cached_reqs
                assert keys == cached.req_ids == list(out.num_scheduled_tokens)
                assert flight.computed.tolist() == cached.num_computed_tokens
                assert flight.fresh == [i for i, blocks in enumerate(cached.new_block_ids) if blocks is not None]
                assert (flight.requests is followed[0]) == (keys == followed[1])
            followed = (flight.requests, keys) if flight else ([], [])
            now = [k for k in out.num_scheduled_tokens if not scheduler.requests[k].is_prefill_chunk]
            at = {k: scheduler.requests[k].num_computed_tokens for k in now}
            rows = list(out.num_scheduled_tokens)
            tokens = [[(ord(k) * 7 + at[k] * 31) % 97 + (k not in "ab") * 4] if k in at else [] for k in rows]  # 3 ends a and b
            flights.append((out, ModelRunnerOutput(rows, {k: i for i, k in enumerate(rows)}, tokens)))
            seen.append(repr({f.name: getattr(out, f.name) for f in dataclasses.fields(out)}))
        if flights and (len(flights) > ahead or not scheduler.has_requests()):
            given_out = scheduler.update_from_output(*flights.pop(0)).get(0)
            if given_out is not None:
                seen.append([(o.request_id, o.new_token_ids, str(o.finish_reason)) for o in given_out.outputs])
            seen.append(len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block))
        elif not flights and not scheduler.has_requests() and number > max(events):
            break
    assert not scheduler.running and not scheduler.requests
    seen.append(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
    return seen, made


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
def test_every_step_is_the_one_that_vllm_would_make(pair, ahead):
    """Samples that come, end at a token or a length, are dropped by the user, pushed out of the cache, or read again."""
    from vllm.v1.request import RequestStatus

    texts = prompts(8, length=40)

    def first(scheduler, add):
        for key, text, length in zip("abcde", texts, (60, 150, 33, 90, 91), strict=False):
            add(key, list(text), length)

    def more(scheduler, add):
        add("f", list(texts[0]), 120)
        add("g", list(texts[6]) * 4, 70)
        add("h", list(texts[7]), 400)

    events = {
        0: first,
        20: lambda scheduler, add: scheduler.finish_requests(["d"], RequestStatus.FINISHED_ABORTED),
        30: more,
        45: lambda scheduler, add: scheduler.reset_prefix_cache(reset_running_requests=True),
        200: lambda scheduler, add: add("i", list(texts[1]), 40),
    }
    engine = pair[1]
    ours, made = _simulated(engine, ahead, True, events)
    plain, _ = _simulated(engine, ahead, False, events)
    for step, (got, want) in enumerate(zip(ours, plain, strict=True)):
        assert got == want, f"entry {step}"
    assert made > len(ours) / 4


def test_a_key_that_comes_again_draws_by_its_new_seed(served):
    engine, _ = served
    text = prompts(1)[0]

    def tokens(seed):
        return generate(engine, [Request(0, text, (seed,), SamplingConfig(max_new_tokens=8, ignore_eos=True))])[0, 0].tokens

    first, second = tokens(1), tokens(2)
    assert first != second
    assert (tokens(1), tokens(2)) == (first, second)
