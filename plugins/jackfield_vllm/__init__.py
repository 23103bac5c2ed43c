"""Rollout engine `vllm`: vLLM in the worker's own process, so that its weights can be the trainer's (docs/engines/vllm.md)."""
