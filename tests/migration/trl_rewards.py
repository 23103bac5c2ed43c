"""Reward functions as a project that trains with TRL has them; nothing here knows jackfield."""

import asyncio


def _text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def share(completions, solution, **kwargs):
    """The share of a completion's words that are the solution."""
    words = [_text(c).split() for c in completions]
    return [said.count(wanted) / max(len(said), 1) for said, wanted in zip(words, solution, strict=True)]


def short(prompts, completions, completion_ids, trainer_state=None, log_metric=None, log_extra=None, **kwargs):
    """Fewer tokens are better, the more so the longer training goes on."""
    lengths = [len(ids) for ids in completion_ids]
    if log_metric:
        log_metric("longest", max(lengths))
    if log_extra:
        log_extra("length", lengths)
    return [-n * (1 + trainer_state.global_step) for n in lengths]


async def slow(completions, **kwargs):
    """Asks a service."""
    await asyncio.sleep(0.01)
    return [float(len(_text(c))) for c in completions]


def maths_only(completions, task, **kwargs):
    """Applies to some rows."""
    return [1.0 if name == "maths" else None for name in task]


def code_only(completions, task, **kwargs):
    """Applies to others, and to none of a third sort."""
    return [2.0 if name == "code" else None for name in task]


def what(prompts, completions, **kwargs):
    """Says what it was called with."""
    raise ValueError(f"prompts={prompts} completions={completions} columns={sorted(kwargs)}")


def one_missing(completions, **kwargs):
    return [0.0 for _ in completions][1:]


def picky(completions, task, **kwargs):
    if "code" in task:
        raise RuntimeError("no code here")
    return [1.0] * len(completions)
