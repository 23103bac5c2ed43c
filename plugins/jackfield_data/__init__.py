"""Datasets: files (jsonl, parquet, hf), procedural tasks (reasoning_gym, arithmetic, copy)."""
