"""A training step as a function that can be overridden, and the two names with which people who know verl start."""
