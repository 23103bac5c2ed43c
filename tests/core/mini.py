"""A group-baseline policy gradient: the smallest algorithm there is."""

import torch

from jackfield import Algorithm, LossOutput


class Mini(Algorithm):
    def advantage(self, batch):
        groups = batch.group_ids[:, None] == batch.group_ids[None, :]
        baseline = (groups * batch.rewards[None, :]).sum(1) / groups.sum(1)
        return batch.replace(advantages=(batch.rewards - baseline)[:, None] * batch.loss_mask)

    def loss(self, outputs, batch):
        ratio = torch.exp(outputs.log_probs - batch.old_log_probs)
        return LossOutput(-ratio * batch.advantages)
