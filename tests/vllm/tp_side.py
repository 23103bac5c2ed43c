"""One rank of tests/vllm/test_tp.py: `python tp_side.py RANK WORLD TP FOLDER OUT`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from jackfield import registry
from jackfield.components import WorkerContext
from jackfield.config import ComponentSpec, ModelConfig
from jackfield.testing.samples import generate, prompts, requests

rank, world, tp, folder, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), world), rank=rank, world_size=world)
context = WorkerContext("policy", torch.device("cpu"), 0, rank=rank, world_size=world)
model = ModelConfig(path=str(folder))
backend = registry.build("backend", ComponentSpec(name="torch"))
backend.setup(model, None, context)
options = {"tp": tp, "memory": 0.06, "max_num_seqs": 16, "args": {"kv_cache_memory_bytes": 2**25}}
engine = registry.build("engine", ComponentSpec(name="vllm", options=options))
engine.setup(model, context)
transport = registry.build("transport", ComponentSpec(name="auto", options={"verify": True}))
transport.connect(backend, engine, context)
transport.sync(3)
if "HOLD" in os.environ:
    (out / f"up-{rank}").touch()
    time.sleep(600)
result = {"position": [engine.position.dp_rank, engine.position.dp_size, engine.position.output]}
result["shards"] = [[s.name, list(s.shape), list(s.offset), list(s.size)] for s in engine.shards()]
mine = prompts(6, length=40, shared=33)[engine.position.dp_rank :: engine.position.dp_size]
for name, sampling in {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0}}.items():
    found = generate(engine, requests(mine, ignore_eos=True, **sampling))
    result[name] = [[*key, s.tokens, s.log_probs] for key, s in sorted(found.items())]
print(json.dumps(result))
