"""REINFORCE and its relatives, one algorithm a file."""
