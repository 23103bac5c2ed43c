"""What advantages cost: work linear in tokens, and at most two temporaries of shape [B, T]. Seconds: bench/advantages.py."""

import importlib.util
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_advantages", ROOT / "bench" / "advantages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("holes", [False, True], ids=["plain", "holes"])
@pytest.mark.parametrize("name", ["gae", "grpo", "rloo"])
def test_at_most_two_temporaries(bench, name, holes):
    assert bench.temporaries(bench.ours(bench.inputs(2048, 1024, holes))[name]) <= 2


def test_work_of_gae_is_linear_in_tokens(bench):
    """Multiplications and additions of the scan, the only part that is not a pass over the tokens: four times as many for four times the
    tokens, and few a token."""
    flops = {}
    for tokens in (1024, 4096, 16384):
        with FlopCounterMode(display=False) as counter:
            bench.ours(bench.inputs(16, tokens, holes=False))["gae"]()
        flops[tokens] = counter.get_total_flops()
    assert flops[4096] / flops[1024] == pytest.approx(4, rel=0.05)
    assert flops[16384] / flops[4096] == pytest.approx(4, rel=0.05)
    assert flops[16384] / (16 * 16384) < 100


def test_exponent(bench):
    assert bench.exponent({256: 1.0, 512: 2.0, 1024: 4.0}) == pytest.approx(1)
    assert bench.exponent({256: 1.0, 512: 4.0, 1024: 16.0}) == pytest.approx(2)
