"""Hook plugins of these tests. They come from a file, so that a run that resumes by itself has them again."""

import os
import signal
import threading
import time

import torch

from jackfield import hookimpl


class Watch:
    """Keeps each step's rewards by sample id, and exports what was trained."""

    @hookimpl(wrapper=True, trylast=True)
    def advantage(self, run, batch):
        torch.save(batch.rewards[batch.sample_ids.argsort()], run.dir / f"rewards-{run.step}.pt")
        return (yield)

    @hookimpl
    def run_end(self, run):
        for role in ("policy", "critic"):
            if hasattr(run, role):
                (run.dir / f"out-{role}").mkdir()
                getattr(run, role).export(run.dir / f"out-{role}")


class Killer:
    """kill -9 of the policy's last worker, once, while it generates in step 1; `noticed` holds the seconds until the error."""

    @hookimpl(wrapper=True)
    def rollout(self, run, prompts):
        if run.step == 1 and not (run.dir / "killed").exists():
            group = run.policy.group
            worker = (group.processes if hasattr(group, "processes") else group.workers)[-1]
            pid = worker.pid if hasattr(worker, "pid") else worker.place.pid
            (run.dir / "killed").write_text(str(time.time()))
            threading.Timer(0.01, os.kill, (pid, signal.SIGKILL)).start()
            while True:  # the real rollout may be over sooner than the signal comes
                list(run.policy.generate([]))
        return (yield)

    @hookimpl
    def run_error(self, run, error):
        (run.dir / "noticed").write_text(f"{time.time() - float((run.dir / 'killed').read_text())} {error}")
