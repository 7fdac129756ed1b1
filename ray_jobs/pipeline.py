"""From prompts to a measured drafter: `pipeline.py -c FILE... [section.field=value ...]`.

rollout -> train -> export -> evaluate -> report. Run it again and it completes what is missing.
"""

from eagle3_train.config import JobConfig
from eagle3_train.runlog import stage_timer
from eagle3_train.stages import preflight, rollout, train
from ray_jobs import cli, evaluate, export, report


def job(config: JobConfig) -> None:
    """The engines that answer the prompts stay loaded and capture for training."""
    rollout.check(config)
    cli.connect()
    preflight.require(config)
    if not (rollout.is_complete(config) and train.is_complete(config)):
        with cli.engines(config, capture=True) as pool:
            with stage_timer(config, "rollout"):
                rollout.run(config, pool)
            with stage_timer(config, "train"):
                train.run(config, pool)
    export.job(config)
    evaluate.job(config)
    report.job(config)


if __name__ == "__main__":
    cli.run(__doc__, job)
