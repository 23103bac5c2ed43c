"""Rollout engine `hf`: a Hugging Face model that shares the trainer's weights, with a generation loop of its own."""
