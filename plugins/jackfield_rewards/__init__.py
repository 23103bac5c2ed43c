"""Rewards: your own Python function, and the usual rules (exact, regex, last_number, length, math, ...)."""
