"""Resharding: bring weights from a training layout into an engine's, moving only what is missing (docs/resharding.md)."""
