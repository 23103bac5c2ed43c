"""What is replaced in vLLM's decode step changes no sample, no block and no count of computed tokens."""

import dataclasses

import numpy as np
import pytest

from jackfield.components import Request
from jackfield.config import SamplingConfig
from jackfield.testing.samples import generate, prompts, requests
from jackfield_vllm import adapter, ledger
from jackfield_vllm.adapter import FINISH
from jackfield_vllm.decode import quick_slots
from jackfield_vllm.record import Record
from jackfield_vllm.steady import Steady, Tokens

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
                patch.setattr(steady, "_make", lambda fresh, make=steady._make: made.append(1) or make(fresh))
            found = use(engine)
        assert not scheduler.running and not (steady and (steady._flights or steady.ledger.rows))
        assert not engine.core._requests and not engine.core._record._rows, "what is kept of a sample outlives it"
        seen.append((found, counts, scheduler.kv_cache_manager.block_pool.get_num_free_blocks()))
    assert seen[0] == seen[1]
    return counts, len(made)


def _samples(found):
    for s in found.values():
        assert len(s.tokens) == len(s.log_probs) == len(s.versions)
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
        engine.weights_updated(engine.version + 1)  # samples in flight are read again
        rest = list(stream)
        for sample in rest:
            at = sample.versions.index(engine.version)
            assert sample.versions == [engine.version - 1] * at + [engine.version] * (len(sample.tokens) - at) and at
        return [(s.request_id, s.tokens, s.log_probs, s.versions) for s in (first, second, *rest)]

    counts, made = _both(pair, monkeypatch, use)
    assert made > len(counts) / 2


def _handed(outputs):
    """What samples got, whoever handed it out."""
    if not isinstance(outputs, Tokens):
        return [(o.request_id, o.new_token_ids, str(o.finish_reason)) for o in outputs]
    reasons = {request.request_id: reason for request, reason in outputs.ended}
    each = zip(outputs.keys, outputs.tokens.tolist(), outputs.alive.tolist(), strict=True)
    return [(key, [token], str(reasons.get(key))) for key, token, alive in each if alive]


def _state(scheduler):
    """All that vLLM can see: requests, their blocks, and what the prefix cache holds."""
    manager = scheduler.kv_cache_manager
    (blocks,) = manager.coordinator.single_type_managers
    names = ("status", "num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens", "block_hashes", "is_prefill_chunk")
    requests = {
        key: (
            [getattr(request, name, None) for name in names],
            list(request.output_token_ids),
            list(request.all_token_ids),
            [block.block_id for block in blocks.req_to_blocks[key]] if key in blocks.req_to_blocks else [],
            blocks.num_cached_block.get(key, 0),
        )
        for key, request in scheduler.requests.items()
    }
    cached = {repr(key): sorted([found.block_id] if hasattr(found, "block_id") else found) for key, found in _cached(manager).items()}
    return {
        "requests": requests,
        "cached": cached,
        "hashes": [repr(block.block_hash) for block in manager.block_pool.blocks],
        "references": [block.ref_cnt for block in manager.block_pool.blocks],
        "queues": [[r.request_id for r in getattr(scheduler, name, ())] for name in ("running", "waiting")],
        "before": set(scheduler.prev_step_scheduled_req_ids),
    }


def _cached(manager):
    return manager.block_pool.cached_block_hash_to_block._cache


def _token(key, position):
    return (ord(key) * 7 + position * 31) % 97 + (key not in "abq") * 4


class Simulation:
    """What each step of a scheduler says, and what comes of it, with tokens that depend on sample and position alone; `ahead` as on a
    GPU: a step is scheduled before the tokens of the last are known.

    `seen` has what must be equal at all times; `states`, by number of the step, what must be equal where somebody looks: after events,
    and where vLLM schedules a step itself. Steady steps leave requests as they are and say so (`Flight`), so that in between only
    what they hand out, take and give back can be seen.
    """

    def __init__(self, engine, ahead, steady):
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        self.core, given = engine.core, engine.core._scheduler
        self.ahead = ahead
        self.scheduler = scheduler = (AsyncScheduler if ahead else Scheduler)(
            vllm_config=given.vllm_config,
            kv_cache_config=given.kv_cache_config,
            structured_output_manager=given.structured_output_manager,
            block_size=engine.core.block_size,
            hash_block_size=engine.core.block_size,
        )
        self.steady = None
        if steady:
            assert Steady.suits(scheduler, adapter.version())
            quick_slots(scheduler)
            self.steady = Steady(scheduler)
        self.seen, self.states, self.own, self.given, self.found = [], {}, set(), {}, {}
        self._followed, self.resumed = ([], []), set()

    def add(self, key, prompt, length, stops=(3,)):
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request as Queued

        params = SamplingParams(max_tokens=length, stop_token_ids=list(stops), ignore_eos=True)
        required = EngineCoreRequest.__struct_fields__[: -len(EngineCoreRequest.__struct_defaults__)]
        fields = {"request_id": key, "prompt_token_ids": list(prompt), "sampling_params": params, "arrival_time": 0.0}
        asked = EngineCoreRequest(**{**dict.fromkeys(required), **fields, "external_req_id": key})
        self.scheduler.add_request(Queued.from_engine_core_request(asked, self.core._client.engine_core.request_block_hasher))

    def drop(self, *keys):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(list(keys), RequestStatus.FINISHED_ABORTED)

    def run(self, events, between, looks):
        """`events[n](self)` before step n is scheduled, `between[n](self)` before its predecessor's tokens are handed out; vLLM's state is
        taken at the steps of `looks`."""
        scheduler, flights = self.scheduler, []
        for number in range(1000):
            if number in events:
                events[number](self)
            if scheduler.has_requests():
                flights.append(self._step(number, number in looks or number in events))
            if number in between:
                between[number](self)
            if flights and (len(flights) > self.ahead or not scheduler.has_requests()):
                given = scheduler.update_from_output(*flights.pop(0)).get(0)
                self._keep([] if given is None else _handed(given.outputs))
            elif not flights and not scheduler.has_requests() and number > max(events):
                break
        assert not scheduler.running and not scheduler.requests
        assert self.steady is None or (not self.steady._flights and not self.steady.ledger.rows)
        return self

    def _keep(self, handed):
        for key, tokens, _ in handed:
            self.given.setdefault(key, []).extend(tokens)
        pool = self.scheduler.kv_cache_manager.block_pool
        self.seen.append(handed)
        self.seen.append([block.block_id for block in pool.free_block_queue.get_all_free_blocks()])  # in the order of their next use

    def _step(self, number, looked_at):
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler, steady = self.scheduler, self.steady
        if looked_at:
            if steady:
                steady.ledger.settle_all()
            self.states[number, "before"] = _state(scheduler)
        out = scheduler.schedule()
        flight = steady and steady.flight(out)
        if not flight:
            self.own.add(number)
            self.states[number, "after"] = _state(scheduler)
        else:
            keys, cached = [r.request_id for r in flight.requests], out.scheduled_cached_reqs
            assert keys == cached.req_ids == list(out.num_scheduled_tokens)
            assert flight.computed.tolist() == cached.num_computed_tokens
            assert flight.fresh == [i for i, blocks in enumerate(cached.new_block_ids) if blocks is not None]
            assert (flight.requests is self._followed[0]) == (keys == self._followed[1])
        self._followed = (flight.requests, keys) if flight else ([], [])
        for new in out.scheduled_new_reqs:
            self.found[new.req_id] = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        self.resumed.update((number, key) for key in cached.resumed_req_ids)
        computed = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        at = {k: computed[k] + n for k, n in out.num_scheduled_tokens.items() if not scheduler.requests[k].is_prefill_chunk}
        rows = sorted(out.num_scheduled_tokens)  # a runner's order is its own
        tokens = [[_token(k, at[k])] if k in at else [] for k in rows]
        self.seen.append(repr({f.name: getattr(out, f.name) for f in dataclasses.fields(out)}))
        checked = dict.fromkeys(rows, 0) if number % 50 == 37 else None  # such an output is vLLM's to take
        return out, ModelRunnerOutput(rows, {k: i for i, k in enumerate(rows)}, tokens, num_nans_in_logits=checked)


def _compared(engine, ahead, events, between, looks):
    """The simulation with steps made here, which is vLLM's own in all that can be seen."""
    ours = Simulation(engine, ahead, True).run(events, between, looks)
    plain = Simulation(engine, ahead, False).run(events, between, looks | ours.own)
    for step, (got, want) in enumerate(zip(ours.seen, plain.seen, strict=True)):
        assert got == want, f"entry {step}"
    for number, when in ours.states:
        for name, want in plain.states[number, when].items():
            assert ours.states[number, when][name] == want, f"{name} {when} step {number}"
    return ours


@pytest.mark.parametrize("turn", [256, 5], ids=["late", "early"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
def test_every_step_is_the_one_that_vllm_would_make(pair, ahead, turn, monkeypatch):
    """Samples that come, end at a token or a length, are dropped by the user, pushed out of the cache, read again, or found by a longer
    prompt. What steady steps leave undone is what vLLM would have done wherever it can be seen."""
    texts = prompts(9, length=40)

    def first(run):
        for key, text, length in zip("abcde", texts, (60, 150, 33, 90, 91), strict=False):
            run.add(key, text, length, stops=(3,) if key in "ab" else (50, 2))

    def more(run):
        run.add("f", texts[0], 120, stops=())
        run.add("g", texts[6] * 4, 70)
        run.add("h", texts[7], 1000)
        run.add("s", texts[5], 80, stops=(_token("s", 70), _token("s", 71)))  # one step ahead, it ends twice

    def longer(run):
        run.add("q", (*texts[8], *run.given["m"]), 40)
        run.add("r", (*texts[ord("m") % 9], *run.given["m"], 1, 2, 3), 20)  # a turn later: prompt and response of a sample that ended

    events = {
        0: first,
        20: lambda run: run.drop("d"),
        30: more,
        45: lambda run: run.scheduler.reset_prefix_cache(reset_running_requests=True),
        200: lambda run: run.add("i", texts[1], 40),
        420: lambda run: [run.add(key, texts[ord(key) % 9], 300 + ord(key) % 7) for key in "jklm"],
        520: lambda run: run.add("n", texts[3], 300),
        760: longer,
    }
    whole = 420 + 2 * pair[1].core.block_size - 40 + ahead  # the step in which k's last block is full, and its last token on the way
    between = {70: lambda run: run.drop("e"), whole: lambda run: run.drop("k")}
    looks = {10, 17, 44, 66, 71, 150, 151, 152, 333, 430, 501, 502, 555}
    monkeypatch.setattr(ledger, "TURN", turn)
    ours = _compared(pair[1], ahead, events, between, looks)
    assert len(ours.own) < len(ours.seen) / 3 / 4, "most steps must be made, not vLLM's"
    assert any(number > 100 for number, _ in ours.resumed), "no sample was pushed out of the cache"
    assert ours.found["r"] > 300, "blocks of a sample that ended were not found"


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
def test_samples_wait_until_one_of_those_that_may_run_at_once_ends(pair, ahead):
    """Steps are made here all the same; the one in which a sample is admitted is vLLM's."""
    texts = prompts(9, length=20)

    def first(run):
        run.scheduler.max_num_running_reqs = run.scheduler.max_num_active_reqs = 3
        for key, text, length in zip("cdefgh", texts, (60, 90, 61, 90, 33, 70), strict=False):
            run.add(key, text, length, stops=())

    between = {75: lambda run: run.drop("g")}  # it waits, or has just come
    events = {0: first, 40: lambda run: run.add("i", texts[8], 50, stops=()), 100: lambda run: run.drop("d")}
    ours = _compared(pair[1], ahead, events, between, {30, 41, 77})
    assert sorted(ours.given) == sorted("cdefhi") or "g" in ours.given
    waited = [number for number in range(5, 59) if number not in ours.own]
    assert len(waited) > 45, "steps while samples wait must be made here"


def test_the_record_of_a_step_is_what_each_sample_gets_at_its_end():
    """Rows grow with samples and tokens, and are given to others when a sample ends."""
    record, want, rng, made = Record(), {}, np.random.default_rng(0), 0
    for step in range(700):
        if step % 5 == 0 and step < 600:
            want[f"s{made}"], made = ([], []), made + 1
        values = rng.random(len(want), np.float32)
        record.write(record.rows(list(want)), values, step)
        for (log_probs, versions), value in zip(want.values(), values.tolist(), strict=True):
            log_probs.append(value)
            versions.append(step)
        for key in [key for key in want if step >= 300 and rng.random() < 0.01]:
            assert record.close(key) == want.pop(key)
    assert want and len(record._counts) < made
    for key, kept in want.items():
        assert record.close(key) == kept
    assert record.close("s0") == ([], [])


def test_a_key_that_comes_again_draws_by_its_new_seed(served):
    engine, _ = served
    text = prompts(1)[0]

    def tokens(seed):
        return generate(engine, [Request(0, text, (seed,), SamplingConfig(max_new_tokens=8, ignore_eos=True))])[0, 0].tokens

    first, second = tokens(1), tokens(2)
    assert first != second
    assert (tokens(1), tokens(2)) == (first, second)
