"""Hook plugin `flow`: the step as one function, `forward`, whose stages can be put in another order."""

from __future__ import annotations

import torch

from jackfield.batch import Batch, Prompt
from jackfield.components import Component
from jackfield.errors import ConfigError
from jackfield.hookspecs import hookimpl
from jackfield.results import answered
from jackfield.run import Run
from jackfield.runner import train
from jackfield.stages import phase, rate, summarise


class DataFlow(Component):
    """Override `forward` to reorder the stages of a step; as it stands it computes what jackfield.runner.step does, bit for bit.

    Each stage calls the hooks of the same name, so that every other plugin of the run takes part as it does otherwise. What a flow
    keeps from one step to the next is its own to save: implement the hooks `checkpoint_save` and `checkpoint_load`.
    """

    run: Run
    """The run whose step this is."""

    def forward(self, inputs: list[Prompt]) -> Batch:
        """From the step's `batch.prompts` prompts to the batch that its metrics describe, scored."""
        batch = self.generate(inputs)
        batch = self.score(batch)
        return self.update(batch)

    def generate(self, prompts: list[Prompt]) -> Batch:
        """Sample `batch.group_size` responses to each prompt, from the weights as they are now (hook `rollout`).

        After an update of the same step the new weights are served first. Tokens are marked with the number of updated weights,
        `run.step` + 1, which a second update within the step does not raise.
        """
        if self._unserved:
            self._serve()
        self._asked.append(list(prompts))
        self._prompts |= {prompt.id: prompt for prompt in prompts}
        with phase(self.run, "rollout"):
            batch: Batch = answered(self.run.hook.rollout, self.run.hook.rollout(run=self.run, prompts=list(prompts)))
        return batch

    def score(self, batch: Batch) -> Batch:
        """The samples with rewards that the filters keep (hooks `score`, `filter`).

        Prompts none of whose samples are kept are replaced by new ones, generated and scored, up to `batch.max_draws` rounds in all.
        A batch that was scored before is scored again and not filled up.
        """
        run, parts, kept = self.run, list[Batch](), 0
        if not run.hook.score.get_hookimpls():
            raise ConfigError(f"{type(self).__name__}.forward calls score, but nothing scores the samples: name a reward under `rewards`")
        asked = self._claim(batch)
        wanted, drawn = len(asked), len(asked)
        for draw in range(run.config.batch.max_draws):
            if draw:
                more = run.prompts.take(wanted - kept)
                batch = self.generate(more)
                asked = self._claim(batch)
                drawn += len(more)
            parts.append(rate(run, batch, asked or [self._prompts[i] for i in batch.group_ids.unique().tolist()]))
            kept += len(torch.unique(parts[-1].group_ids))
            if kept >= wanted:
                break
        counts = {"drawn": drawn, "trained": kept, "dropped": drawn - kept} if wanted else {}
        run.metrics |= {f"prompts/{name}": run.metrics.get(f"prompts/{name}", 0.0) + n for name, n in counts.items()}
        return Batch.concat(parts)

    def update(self, batch: Batch) -> Batch:
        """Train on a scored batch, which is returned with what that took (hooks `advantage`, `update`): log-probs, values, advantages."""
        if batch.rewards is None:
            raise ConfigError(f"{type(self).__name__}.forward: update needs rewards: give it what score returned")
        batch = train(self.run, batch)
        self._unserved = True
        return batch

    @hookimpl
    def step(self, run: Run) -> dict[str, float]:
        """`forward` on the next prompts, and around it what every step has: the sync, the summary, `step_start` and `step_end`."""
        self.run, run.metrics = run, {}
        self._asked: list[list[Prompt]] = []
        self._prompts: dict[int, Prompt] = {}
        self._unserved = False
        with phase(run, "step"):
            run.hook.step_start(run=run)
            batch = self.forward(run.prompts.take(run.config.batch.prompts))
            if not isinstance(batch, Batch) or batch.scores is None:
                got = "a batch without scores" if isinstance(batch, Batch) else repr(batch)
                raise ConfigError(f"{type(self).__name__}.forward returned {got[:80]}: return the scored batch that the step is to report")
            self._serve()
            summarise(run, batch)
        run.step += 1
        run.hook.step_end(run=run, metrics=run.metrics)
        return run.metrics

    def _serve(self) -> None:
        with phase(self.run, "sync"):
            report = self.run.policy.sync(self.run.step + 1)
        self.run.hook.weights_synced(run=self.run, report=report)
        self._unserved = False

    def _claim(self, batch: Batch) -> list[Prompt]:
        """The prompts that were asked for to get this batch, each once; a rollout may have dropped some of them, or all."""
        here, mine, others = set(batch.group_ids.tolist()), dict[int, Prompt](), []
        for asked in self._asked:
            prompts = {prompt.id: prompt for prompt in asked}
            if not here or here & prompts.keys():
                mine |= prompts
            else:
                others.append(asked)
        self._asked = others
        return list(mine.values())
