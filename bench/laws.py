"""Correctness over several GPUs (NCCL) or processes (gloo): the laws that several ranks could break, from the tests themselves.

    python bench/laws.py --device cuda
    python bench/laws.py --processes 4 --quick          # gloo

- Laws 1 to 3 and 20: the backends' conformance kit (bench/laws_backends.py) in TP2 PP2, TP4, CP2, FSDP, and with 8 ranks TP2 PP2 DP2.
- Laws 23 to 25: the tests of tests/reshard that need several ranks, each rank running the test function itself.
- Laws 2 (log-probs), 23 and 26 with real components: Megatron and vLLM in their layouts, through an update and back again.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import report
from ranks import Here, RanksFailed

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = {
    "megatron": "jackfield_megatron.backend:MegatronBackend",
    "fsdp": "jackfield_torch.fsdp:FSDPBackend",
    "torch": "jackfield_torch.backend:TorchBackend",
}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], str]] = {
    # name: (backend, ranks, options, family)
    "megatron-tp2-pp2": ("megatron", 4, {"tp": 2, "pp": 2}, "qwen3"),
    "megatron-tp4": ("megatron", 4, {"tp": 4}, "llama"),
    "megatron-tp2-pp2-dp2": ("megatron", 8, {"tp": 2, "pp": 2}, "llama"),
    "megatron-tp2": ("megatron", 2, {"tp": 2}, "llama"),
    "megatron-pp2": ("megatron", 2, {"pp": 2}, "qwen2"),
    "megatron-dp2": ("megatron", 2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, "qwen2"),
    "megatron-cp2": ("megatron", 2, {"cp": 2}, "llama"),
    "torch2": ("torch", 2, {}, "llama"),
    "fsdp2": ("fsdp", 2, {}, "llama"),
    "fsdp4": ("fsdp", 4, {}, "llama"),
    "fsdp8": ("fsdp", 8, {}, "qwen2"),
    "megatron-alone": ("megatron", 1, {}, "llama"),
}
LAWS = {
    "test_gradient_is_that_of_transformers": "1 (any split has one process's gradient)",
    "test_micro_batches_do_not_show": "1, 2 (micro-batches, order of samples)",
    "test_log_probs_are_those_of_transformers": "8, 11 (log-probs)",
    "test_nothing_to_train": "16, 20 (fillers, equal counts)",
}
QUICK = {"megatron-tp2-pp2", "fsdp2"}


def backends(device: str, most: int, quick: bool, timeout: float) -> list[dict[str, Any]]:
    """One row for each layout and law. Each layout has a pytest of its own, so that one that hangs costs no other's results."""
    fitting = [name for name, (_, needed, _, _) in LAYOUTS.items() if needed <= most]
    left = sorted({f"{LAYOUTS[n][1]} ranks" for n in LAYOUTS if n not in fitting})
    rows: list[dict[str, Any]] = []
    if left:
        rows.append({"what": "larger layouts", "skipped": f"{', '.join(left)} needed, here are {most}"})
    end = time.monotonic() + timeout
    for name in [n for n in fitting if n in QUICK] or fitting if quick else fitting:
        if (rest := end - time.monotonic()) > 0:
            rows += _layout(name, device, quick, rest)
        else:
            rows.append({"what": name, "skipped": f"the {timeout:.0f} s for layouts were over"})
    return rows


def _layout(name: str, device: str, quick: bool, timeout: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "junit.xml")
        file = Path(__file__).with_name("laws_backends.py")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["--rootdir", str(ROOT), str(file), f"--junitxml={out}"]
        if quick:
            command += ["-k", "test_micro_batches_do_not_show or test_gradient"]
        ended, said = ranks.call(command, {"BENCH_DEVICE": device, "BENCH_LAYOUTS": name}, folder, timeout)
        if ended is None:
            return [{"what": name, "error": f"not finished within {timeout:.0f} s"}]
        cases = list(ET.parse(out).getroot().iter("testcase")) if out.is_file() else []
        if not cases:
            return [{"what": name, "error": f"nothing ran: {said[-300:]}"}]
        rows = []
        for case in cases:
            bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
            row: dict[str, Any] = {"what": name, "law": LAWS[case.attrib["name"]], "ok": not bad, "seconds": float(case.attrib["time"])}
            rows.append(row | ({"error": bad[0].attrib.get("message", "")[:300]} if bad else {}))
        return rows


def _module(name: str, device: str) -> Any:
    folder = ROOT / "tests" / "reshard"
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # what the tests import from beside them
    spec = importlib.util.spec_from_file_location(f"spmd_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.fakes.DEVICE = device
    return module


def _runner(here: Here) -> Callable[..., list[Any]]:
    """The fixture `ranks` of tests/reshard for one rank among many: run the body here, and have everybody's results."""
    import torch.distributed as dist

    def run(world: int, body: Callable[[int, int], Any], timeout: float = 0) -> list[Any]:
        assert world == here.world, f"the test is for {world} ranks, here are {here.world}"
        results: list[Any] = [None] * world
        dist.all_gather_object(results, body(here.rank, world))
        return results

    return run


def tests(quick: bool) -> list[tuple[int, str, str, str, dict[str, Any]]]:
    """(ranks, law, module, test, arguments besides `ranks`)."""
    from jackfield_reshard.layout import Layout
    from jackfield_reshard.transports import P2P, Auto

    arrive = [
        "megatron tp2 pp2 to vllm tp2",
        "to tp4, more than its key-value heads",
        "to dp4",
        "virtual stages to tp2",
        "fsdp to tp2",
        "experts",
    ]
    out: list[tuple[int, str, str, str, dict[str, Any]]] = []
    for case in arrive[:2] if quick else arrive:
        for transport in (P2P,) if quick else (P2P, Auto):
            out.append((4, "23", "test_ranks", "test_weights_arrive", {"case": case, "transport": transport}))
    out.append((4, "23", "test_ranks", "test_separate_trainers_and_engines", {"transport": P2P}))
    for bucket in (1 << 12,) if quick else (16, 1 << 12, 256 << 20):
        out.append((4, "23", "test_laws", "test_law_23_any_bucket_and_one_weight_in_each_layer", {"bucket": bucket}))
    out += [(2, "25", "test_laws", "test_law_25_tied_embeddings", {"pp": 2, "vpp": v}) for v in (1, 2)]
    families = [
        ("llama", {"tp": 2, "pp": 2}, Layout("megatron", tp=2, pp=2), Layout("vllm", tp=2, dp=2)),
        ("qwen2", {"tp": 2, "pp": 2}, Layout("megatron", tp=2, pp=2), Layout("vllm", tp=4)),
        ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}, Layout("megatron", tp=2, pp=2, ep=2, etp=1), Layout("vllm", tp=2, dp=2, ep=2)),
    ]
    for family, options, train, serve in [] if quick else families:
        more = {"family": family, "options": options, "train": train, "serve": serve}
        out.append((4, "23, 24, 25", "test_agreement", "test_megatron", more))
    return out


def _run_tests(here: Here, chosen: list[tuple[int, str, str, str, dict[str, Any]]]) -> list[float]:
    took, run = [], _runner(here)
    for _, _, module, name, arguments in chosen:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            extra = {"tmp_path": Path(folder)} if name == "test_megatron" else {}
            try:
                getattr(_module(module, here.device.type), name)(run, **extra, **arguments)
            except Exception as error:
                raise RuntimeError(f"{name} {arguments} failed: {type(error).__name__}: {error}") from error
        here.gate()
        took.append(time.perf_counter() - begin)
    return took


def resharding(device: str, most: int, quick: bool, timeout: float) -> list[dict[str, Any]]:
    """One row for each test; what needs more ranks than there are is said."""
    rows: list[dict[str, Any]] = []
    every = tests(quick)
    for world in sorted({test[0] for test in every}):
        mine = [test for test in every if test[0] == world]
        if world > most:
            rows += [{"what": _label(t), "law": t[1], "skipped": f"needs {world} ranks, here are {most}"} for t in mine]
            continue
        while mine:
            try:
                took = ranks.run(world, device, _run_tests, mine, timeout=timeout)[0]
                rows += [{"what": _label(t), "law": t[1], "ok": True, "seconds": s} for t, s in zip(mine, took, strict=True)]
                mine = []
            except RanksFailed as error:
                failed = next((k for k, t in enumerate(mine) if f"{t[3]} {t[4]}" in str(error)), 0)
                rows += [{"what": _label(t), "law": t[1], "ok": True} for t in mine[:failed]]
                rows.append({"what": _label(mine[failed]), "law": mine[failed][1], "ok": False, "error": _last(error)})
                mine = mine[failed + 1 :]
    return rows


def _label(test: tuple[int, str, str, str, dict[str, Any]]) -> str:
    said = [getattr(v, "__name__", None) or str(v) for v in test[4].values() if not isinstance(v, dict)]
    return f"{test[3].removeprefix('test_')}: {', '.join(said)}"


def _last(error: RanksFailed) -> str:
    return str(error).strip().splitlines()[-1][:300]


def main() -> None:
    """Run, print, write; the exit status tells whether all held."""
    import laws_engine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--quick", action="store_true", help="a few of each kind")
    parser.add_argument("--engine", choices=("hf", "vllm"), help="default: vllm where it is installed")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for each of the three parts")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "laws.json")
    args = parser.parse_args()
    most = ranks.devices(args.device, args.processes)
    rows = backends(args.device, most, args.quick, args.timeout)
    rows += resharding(args.device, most, args.quick, args.timeout)
    rows += laws_engine.rows(args.device, most, args.quick, args.timeout, args.engine)
    print(report.table(rows))
    report.write(args.out, rows)
    sys.exit(any(row.get("ok") is False or "error" in row for row in rows))


if __name__ == "__main__":
    main()
