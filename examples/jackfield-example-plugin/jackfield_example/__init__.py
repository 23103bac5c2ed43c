"""Five plugins of five kinds, each in one file."""
