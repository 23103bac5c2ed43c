"""Reward functions written for TRL or verl, as the worker processes call them; needs nothing but the standard library."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = frozenset({"prompt", "messages", "response", "response_tokens", "finish_reason", "turns", "completion", "completion_ids"})
"""Keys of a record that are no column of the dataset, or that TRL does not hand on either."""


@dataclass
class TrainerState:
    """What functions read of `trainer_state`: the fields of transformers' class that mean something here."""

    global_step: int = 0
    """Steps finished."""
    max_steps: int = 0
    """Steps of the run."""
    epoch: float = 0.0
    """Passes over the dataset so far."""
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    log_history: list[dict[str, float]] = field(default_factory=list)
    """Always empty here."""


def plain(score: Any) -> Any:
    """A score as a Python number where it is one: numpy's and torch's stay in the worker. None and nonsense pass."""
    if score is None or isinstance(score, str):
        return score
    try:
        return float(score)
    except (TypeError, ValueError):
        return score


def finished(result: Any) -> Any:
    """The result of a function, whether it was plain or a coroutine."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def numbers(values: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Of many dicts the numbers, by key."""
    found: dict[str, list[float]] = {}
    for each in values:
        for name, value in each.items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append(float(value))
    return found


def own_metrics(run: Any, function: str, found: dict[str, list[float]]) -> None:
    """Show the means of a function's own numbers as `reward/<function>/<name>`; later calls of a step replace earlier ones."""
    short = function.rpartition(":")[2]
    run.metrics |= {f"reward/{short}/{name}": sum(values) / len(values) for name, values in found.items() if values}


def trl(function: Callable[..., Any]) -> Callable[..., Any]:
    """In the worker: a TRL function as one of (list of (record, completion ids), state) that returns (scores, its own metrics)."""

    def call(items: Sequence[tuple[dict[str, Any], Any]], state: TrainerState) -> tuple[Any, dict[str, list[float]]]:
        records, chats = [record for record, _ in items], "messages" in items[0][0]
        metrics: dict[str, list[float]] = {}
        columns = {name: [record.get(name) for record in records] for name in records[0] if name not in OURS}
        result = function(
            prompts=[record["messages" if chats else "prompt"] for record in records],
            completions=[[{"role": "assistant", "content": r["response"]}] if chats else r["response"] for r in records],
            completion_ids=[ids for _, ids in items],
            **columns,
            trainer_state=state,
            log_extra=lambda column, values: None,
            log_metric=lambda name, value: metrics.setdefault(name, []).append(float(value)),
        )
        scores = finished(result)
        return [plain(s) for s in scores] if hasattr(scores, "__iter__") else type(scores).__name__, metrics

    return call


def _verl_arguments(record: dict[str, Any], key: str) -> dict[str, Any]:
    """By verl's names. `num_turns` counts messages, the prompt's and the answers', as verl's agent loops do."""
    turns = len(record.get("turns", [None]))
    info = {**(record.get("extra_info") or {}), "num_turns": 2 * turns, "rollout_reward_scores": {}}
    truth = (record.get("reward_model") or {}).get("ground_truth")
    return {"data_source": record.get(key), "solution_str": record["response"], "ground_truth": truth, "extra_info": info}


def _plain_or_dict(result: Any) -> Any:
    if not isinstance(result, dict):
        return plain(result)
    return {name: plain(value) for name, value in result.items() if name == "score" or isinstance(plain(value), float)}


def verl(function: Callable[..., Any]) -> Callable[..., Any]:
    """In the worker: a verl function as one of a record."""

    def call(record: dict[str, Any], *, key: str, more: dict[str, Any]) -> Any:
        return _plain_or_dict(finished(function(**{**_verl_arguments(record, key), **more})))

    return call


def verl_batched(function: Callable[..., Any]) -> Callable[..., Any]:
    """In the worker: a function of verl's reward manager `batch` as one of a list of records."""

    def call(records: Sequence[dict[str, Any]], *, key: str, more: dict[str, Any]) -> Any:
        rows = [_verl_arguments(record, key) for record in records]
        columns = {f"{name}s": [row[name] for row in rows] for name in rows[0]}
        results = finished(function(**{**columns, **more}))
        return [_plain_or_dict(r) for r in results] if hasattr(results, "__iter__") else type(results).__name__

    return call
