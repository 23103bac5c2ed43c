"""The engine as it runs on a GPU, each step started before the tokens of the last are known, on a CPU: no sample is another."""

import pytest

from jackfield.components import Request
from jackfield.config import SamplingConfig
from jackfield.testing.samples import prompts, requests
from jackfield_vllm.ahead import Ahead

pytestmark = pytest.mark.vllm


class Copied:
    """vLLM's result of a step that runs ahead, without a stream to copy on: what it holds is taken only when it is asked for."""

    def __init__(self, model_runner_output, sampled_token_ids, logprobs_tensors, invalid_req_indices, **rest):
        self.sampled_token_ids_cpu = self.async_copy_ready_event = None
        self.given = model_runner_output, sampled_token_ids.clone(), logprobs_tensors, invalid_req_indices

    def get_output(self):
        output, tokens, log_probs, invalid = self.given
        output.sampled_token_ids = tokens.tolist()
        for row in invalid:
            output.sampled_token_ids[row].clear()
        output.logprobs = log_probs.tolists()
        return output


@pytest.fixture(scope="module")
def ahead(llama, build, trainer, connect):
    """An engine that runs one step ahead, whose cache holds about three of the longest samples."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.outputs import AsyncModelRunnerOutput
    from vllm.v1.worker import gpu_model_runner

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls, config):
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    result = type("Copied", (Copied, AsyncModelRunnerOutput), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))
        patch.setattr(gpu_model_runner, "AsyncGPUModelRunnerOutput", result)
        patch.setattr(gpu_model_runner.GPUModelRunner, "_get_or_create_async_output_copy_stream", lambda self: None, raising=False)
        engine = build(llama, args={"kv_cache_memory_bytes": 2**20})
        connect(trainer(llama), engine).sync(0)
        assert engine.core.runner.use_async_scheduling
        yield engine


def _same(got, want):
    """Batches end a step later, so that sums may round differently."""
    got, want = (sorted(samples, key=lambda s: (s.request_id, s.index)) for samples in (got, want))
    for g, w in zip(got, want, strict=True):
        assert (g.request_id, g.index, g.tokens, g.finish_reason) == (w.request_id, w.index, w.tokens, w.finish_reason)
        assert g.log_probs == pytest.approx(w.log_probs, abs=1e-5)


@pytest.fixture
def counted(ahead, monkeypatch):
    """How many steps were counted on, and how many were prepared by vLLM."""
    owner = ahead.core.runner._prepare_inputs.__self__
    assert isinstance(owner, Ahead)
    seen = {"on": 0, "whole": 0}

    def count(name, method):
        def wrapped(*args):
            seen[name] += 1
            return method(*args)

        return wrapped

    monkeypatch.setattr(owner, "_count_on", count("on", owner._count_on))
    monkeypatch.setattr(owner, "_prepare", count("whole", owner._prepare))
    book, batch = ahead.core.runner._bookkeeping_sync, ahead.core.runner.input_batch

    def booked(*args):
        found = book(*args)
        for key, row in batch.req_id_to_index.items():
            assert ahead.core.runner.requests[key].num_tokens == batch.num_tokens_no_spec[row]
        return found

    monkeypatch.setattr(ahead.core.runner, "_bookkeeping_sync", booked)
    return seen


def test_samples_are_those_of_an_engine_in_step(ahead, served, counted):
    """Lengths and stop tokens of their own, settings that differ, prompts that are shared, the longest sequence there is."""
    kinds = [SamplingConfig(max_new_tokens=n, stop_ids=(7, 8), temperature=t) for n, t in ((30, 1.0), (60, 0.7), (90, 1.3))]
    asked = [Request(i, p, (i, i + 100), kinds[i % 3]) for i, p in enumerate(prompts(6, length=24))]
    asked += [Request(9, prompts(1, length=ahead.core.max_model_len - 20)[0], (5,), SamplingConfig(max_new_tokens=50, ignore_eos=True))]
    _same(ahead.generate(asked), served[0].generate(asked))
    assert counted["on"] > counted["whole"] > 0


def test_samples_that_are_dropped_from_the_cache_or_read_again_under_the_same_weights(ahead, served, counted, monkeypatch):
    asked = requests(prompts(6, length=40), group=2, max_new_tokens=100, ignore_eos=True)

    def use(engine):
        stream = engine.generate([*asked, Request(50, asked[0].tokens, (3,), SamplingConfig(max_new_tokens=7, ignore_eos=True))])
        yield next(stream)
        engine.weights_updated(engine.version)
        yield from stream

    preempted = []
    preempt = ahead.core._scheduler._preempt_request
    monkeypatch.setattr(ahead.core._scheduler, "_preempt_request", lambda *args, **kwargs: preempted.append(1) or preempt(*args, **kwargs))
    _same(use(ahead), use(served[0]))
    assert len(preempted) > len(asked) * 2, "the cache is not tight"
    assert counted["on"] > counted["whole"] > 0
