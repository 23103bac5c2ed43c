"""Rollouts: `single_turn` (one call of the engine a sample) and `multi_turn` (an environment answers between calls)."""
