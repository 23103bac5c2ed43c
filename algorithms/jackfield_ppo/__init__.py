"""PPO and its critic."""
