"""The hooks. Each runs on the controller, a few times a step, with whole batches; see docs/hooks/."""

from __future__ import annotations

import pluggy

hookspec = pluggy.HookspecMarker("jackfield")
hookimpl = pluggy.HookimplMarker("jackfield")
"""Marks a method as the implementation of the hook of the same name; `wrapper=True` wraps the other implementations."""


class Hooks:
    """Hook specifications. `run` is the jackfield.run.Run throughout; `batch` a jackfield.Batch."""

    # ---- stages ---------------------------------------------------------------------------------------------------
    @hookspec(firstresult=True)
    def rollout(self, run, prompts):
        """Sample responses for `prompts` (list of Prompt): a Batch of `group_size` samples for each. First result wins."""

    @hookspec
    def score(self, run, batch):
        """Score every sample: a dict from reward name to float32 [B], NaN where that sample could not be scored. All results are
        merged; `run` combines them by the weights in the config (1 for names it does not list)."""

    @hookspec
    def filter(self, run, batch):
        """Bool [B]: which samples to keep. All results are ANDed; the runner draws more prompts until the batch is full."""

    @hookspec(firstresult=True)
    def advantage(self, run, batch):
        """The batch with `advantages` (and `returns`). First result wins; usually the algorithm's."""

    @hookspec(firstresult=True)
    def update(self, run, batch):
        """Train on the batch; a dict of float metrics. First result wins; usually the algorithm's."""

    @hookspec(firstresult=True)
    def step(self, run):
        """A whole step in the place of jackfield.runner.step, `run.step` raised by 1: its metrics. First result wins; where nobody answers
        the runner's is run."""

    # ---- life of a run ----------------------------------------------------------------------------------------------
    @hookspec
    def configure(self, run):
        """After all plugins are registered, before anything is started: check settings, raise ConfigError."""

    @hookspec
    def run_start(self, run):
        """Models are loaded and any checkpoint restored; the first step comes next."""

    @hookspec
    def step_start(self, run):
        """Before the rollout of step `run.step`."""

    @hookspec
    def step_end(self, run, metrics):
        """After the sync of step `run.step`; `metrics` is the step's dict of floats, to read or to add to."""

    @hookspec
    def weights_synced(self, run, report):
        """After each sync of weights into the engine; `report` is a SyncReport."""

    @hookspec
    def checkpoint_save(self, run, folder):
        """A checkpoint is being written into `folder` (a Path that becomes visible only when complete): add your own files."""

    @hookspec
    def checkpoint_load(self, run, folder):
        """The run resumes from `folder` at `run.step`: read what checkpoint_save wrote, if it is there; the models are loaded next."""

    @hookspec
    def evaluate(self, run):
        """Asked for by the hook plugin `evaluate`, every few steps: a dict of float metrics, merged into the step's under `eval/`."""

    @hookspec
    def run_end(self, run):
        """The run has finished its last step. Not called after an error."""

    @hookspec
    def run_error(self, run, error):
        """The run ends with `error`, an exception; clean up, do not raise."""

    # ---- extending jackfield ------------------------------------------------------------------------------------------
    @hookspec
    def add_hookspecs(self, manager):
        """Called when plugins are registered: add hook specifications of your own with `manager.add_hookspecs(Class)`."""
