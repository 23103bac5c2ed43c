"""An algorithm that goes wrong on one rank: on the one that has sample 999."""

from jackfield.registry import load

GRPO = load("algorithm", "grpo")


class Touchy(GRPO):
    def loss(self, outputs, batch):
        if (batch.sample_ids == 999).any():
            raise ValueError("the metric fell over")
        return super().loss(outputs, batch)
