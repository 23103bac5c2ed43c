"""Commands that look at configs and runs: `config` and `export`."""
