"""Algorithm `centred`: policy gradient whose advantages are rewards centred and scaled over the whole batch (REINFORCE, Williams 1992)."""

import torch

from jackfield import Algorithm, AlgorithmConfig, Batch, LossOutput, Outputs


class Centred(Algorithm):
    """Rewards centred and scaled over the batch; the ratio to the old policy is clipped."""

    class Config(AlgorithmConfig):
        """Beside what every algorithm has."""

        clip: float = 0.2
        """The ratio earns nothing beyond 1 - clip and 1 + clip."""

    config: Config

    def advantage(self, batch: Batch) -> Batch:
        """(reward - mean) / std over the samples that are trained on; exactly 0 where all rewards are equal (law 14)."""
        trained = batch.loss_mask.any(-1)
        rewards = batch.rewards[trained]
        values = torch.zeros(len(batch))
        if len(rewards) > 1 and rewards.max() > rewards.min():
            values[trained] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        return batch.replace(advantages=values[:, None] * batch.loss_mask)

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """Per-token loss [b, T]."""
        ratio = (outputs.log_probs - batch.old_log_probs).clamp(-20, 20).exp()
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        return LossOutput(-torch.minimum(ratio * batch.advantages, clipped * batch.advantages))
