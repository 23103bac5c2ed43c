"""The algorithms' shared library: what the core's `functional` offers, masked means, group statistics, returns and GAE, under one name."""

from jackfield.functional import (
    LOG_RATIO_LIMIT,
    adaptive_kl_multiplier,
    group_index,
    kl_estimate,
    log_ratio,
    trained,
)
from jackfield_estimators.clipped import ClippedAlgorithm, ClippedConfig, clipped_surrogate
from jackfield_estimators.groups import GroupStats, group_center, group_stats, group_sum, leave_one_out
from jackfield_estimators.reductions import masked_mean, masked_whiten, sequence_mean
from jackfield_estimators.relative import GroupAlgorithm, GroupConfig
from jackfield_estimators.returns import (
    clipped_value_loss,
    discounted_returns,
    gae,
    moved,
    outcomes,
    placed_rewards,
    spread,
    with_advantages,
)

__all__ = [
    "LOG_RATIO_LIMIT",
    "ClippedAlgorithm",
    "ClippedConfig",
    "GroupAlgorithm",
    "GroupConfig",
    "GroupStats",
    "adaptive_kl_multiplier",
    "clipped_surrogate",
    "clipped_value_loss",
    "discounted_returns",
    "gae",
    "group_center",
    "group_index",
    "group_stats",
    "group_sum",
    "kl_estimate",
    "leave_one_out",
    "log_ratio",
    "masked_mean",
    "masked_whiten",
    "moved",
    "outcomes",
    "placed_rewards",
    "sequence_mean",
    "spread",
    "trained",
    "with_advantages",
]
