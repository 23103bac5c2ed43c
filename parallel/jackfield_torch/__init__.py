"""Training backends on plain PyTorch: `torch` (one process) and `fsdp` (FSDP2), for any Hugging Face causal LM."""
