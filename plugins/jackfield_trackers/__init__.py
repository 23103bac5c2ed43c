"""Trackers: TensorBoard, Weights & Biases, MLflow, and `samples` (a file of what the model says). None needs a network."""
