"""Every registered algorithm obeys the laws."""

from jackfield import registry
from jackfield.testing.algorithm import AlgorithmConformance

NAMES = [entry.name for entry in registry.entries("algorithm") if entry.distribution == "jackfield"]
SETTINGS = {
    "clip_cov": {"ratio": 0.3, "cov_low": -0.5},
    "dapo": {"overlong_buffer": 4, "dual_clip": 3.0},
    "kl_cov": {"ratio": 0.3},
    "ppo": {"gamma": 0.9, "dual_clip": 2.0},
}
"""Settings under which what is particular to the algorithm happens in small batches too."""
MORE = {
    "dppo_kl": ("dppo", {"divergence": "kl", "clip_low": 0.05, "clip_high": 0.05}),
    "gdpo_tokens": ("gdpo", {"batch_norm": "tokens"}),
    "passk_grpo_2": ("passk_grpo", {"k": 2, "std": True}),
}
"""Other sides of some of them."""

for _label, (_name, _config) in ({name: (name, SETTINGS.get(name, {})) for name in NAMES} | MORE).items():
    _class = f"Test_{_label}"
    globals()[_class] = type(_class, (AlgorithmConformance,), {"algorithm": _name, "config": _config, "__module__": __name__})


def test_all_are_tried():
    assert len(NAMES) >= 21
