"""GRPO and its variants, one algorithm a file."""
