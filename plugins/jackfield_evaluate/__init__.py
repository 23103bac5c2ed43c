"""Hook plugin `evaluate`: held-out reward while training."""
