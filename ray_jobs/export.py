"""Write the drafter as vLLM and SGLang load it: `export.py -c FILE... [section.field=value ...]`."""

from eagle3_train.config import JobConfig
from eagle3_train.runlog import stage_timer
from eagle3_train.stages import export
from ray_jobs import cli


def job(config: JobConfig) -> None:
    """Needs neither cluster nor engine."""
    with stage_timer(config, "export"):
        export.run(config)


if __name__ == "__main__":
    cli.run(__doc__, job)
