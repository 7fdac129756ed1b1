"""Measure the drafter in the engine: `evaluate.py -c FILE... [section.field=value ...]`.

`evaluate.against=DIR` measures another drafter of the same target beside it.
"""

from eagle3_train.config import JobConfig
from eagle3_train.runlog import stage_timer
from eagle3_train.stages import evaluate
from ray_jobs import cli


def job(config: JobConfig) -> None:
    """Serve with and without drafter on the same prompts."""
    cli.connect()
    with stage_timer(config, "evaluate"):
        evaluate.run(config)


if __name__ == "__main__":
    cli.run(__doc__, job)
