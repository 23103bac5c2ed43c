"""An algorithm of your own: REINFORCE whose baseline is the mean reward of the other samples of the same prompt."""

from jackfield import Algorithm, LossOutput


class LeaveOneOut(Algorithm):
    def advantage(self, batch):
        same = (batch.group_ids[:, None] == batch.group_ids[None, :]).float().fill_diagonal_(0)
        baseline = same @ batch.rewards / same.sum(-1).clamp(min=1)
        return batch.replace(advantages=(batch.rewards - baseline)[:, None] * batch.loss_mask)

    def loss(self, outputs, batch):
        return LossOutput(-outputs.log_probs * batch.advantages)
