"""The target answers the prompts: `rollout.py -c FILE... [section.field=value ...]`."""

from eagle3_train.config import JobConfig
from eagle3_train.runlog import stage_timer
from eagle3_train.stages import rollout
from ray_jobs import cli


def job(config: JobConfig) -> None:
    """Answer every prompt that has no committed answer yet."""
    if rollout.is_complete(config) or config.corpus.answers == "given":
        rollout.run(config, None)  # needs no engine
        return
    rollout.check(config)
    cli.connect()
    with stage_timer(config, "rollout"), cli.engines(config, capture=False) as pool:
        rollout.run(config, pool)


if __name__ == "__main__":
    cli.run(__doc__, job)
