"""Ranks for tests: processes forked from one import of torch, joined by gloo."""

import multiprocessing
import os
import pickle
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


def _child(pipe, body, rank, world, store):
    try:
        torch.set_num_threads(1)
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
        pipe.send_bytes(pickle.dumps((True, body(rank, world))))
    except BaseException:  # noqa: BLE001 (the parent raises it)
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        os._exit(0)


@pytest.fixture
def ranks(tmp_path):
    """`ranks(world, body)`: run `body(rank, world)` in that many processes and return the results by rank."""
    count = 0

    def run(world, body, seconds=100):
        nonlocal count
        count += 1
        context = multiprocessing.get_context("fork")
        pipes, children = [], []
        for rank in range(world):
            mine, theirs = context.Pipe(False)
            child = context.Process(target=_child, args=(theirs, body, rank, world, tmp_path / f"store{count}"))
            child.start()
            theirs.close()
            pipes.append(mine)
            children.append(child)
        try:
            results = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(seconds), f"rank {rank} did not answer in {seconds} s"
                results.append(pickle.loads(pipe.recv_bytes()))
        finally:
            for child in children:
                child.kill()
                child.join()
        failures = [text for done, text in results if not done]
        assert not failures, failures[0]
        return [value for _, value in results]

    return run
