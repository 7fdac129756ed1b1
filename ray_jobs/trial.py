"""One trial of a W&B sweep: the pipeline under a run name of its own, sharing the base run's rollout.

`wandb agent` calls it with the sweep's settings as `section.field=value` and the trial's id in WANDB_RUN_ID.
"""

import os
import shutil

from eagle3_train.config import JobConfig
from eagle3_train.rundir import RunDir, write_atomic
from ray_jobs import cli, pipeline


def job(config: JobConfig) -> None:
    """Copy the base run's answers when there are any, then run what is missing."""
    trial_id = os.environ.get("WANDB_RUN_ID", "local")
    trial = config.model_copy(update={"name": f"{config.name}-{trial_id}"})
    base, own = RunDir(config.run_path), RunDir(trial.run_path)
    if base.samples.exists() and not own.samples.exists():
        shutil.copytree(base.samples.parent, own.samples.parent)
    if not own.wandb_id.exists():
        write_atomic(own.wandb_id, trial_id)
    pipeline.job(trial)


if __name__ == "__main__":
    cli.run(__doc__, job)
