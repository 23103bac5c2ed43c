"""Correction for the gap between the policy that sampled and the policy that trains."""
