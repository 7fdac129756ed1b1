"""Stream hidden states into the drafter: `train.py -c FILE... [section.field=value ...]`."""

from eagle3_train.config import JobConfig
from eagle3_train.runlog import log, stage_timer
from eagle3_train.stages import preflight, train
from ray_jobs import cli


def job(config: JobConfig) -> None:
    """Preflight, then train on the rollout's samples."""
    if train.is_complete(config):
        log.info("train: already complete")
        return
    train.check(config)
    cli.connect()
    preflight.require(config)
    with stage_timer(config, "train"), cli.engines(config, capture=True) as pool:
        train.run(config, pool)


if __name__ == "__main__":
    cli.run(__doc__, job)
