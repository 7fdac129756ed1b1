"""Write the record of a run and print its card: `report.py -c FILE... [section.field=value ...]`.

`report.against=RUN_DIRECTORY` flags what changed by more than 5 % since another run.
"""

from eagle3_train.config import JobConfig
from eagle3_train.stages import report
from ray_jobs import cli


def job(config: JobConfig) -> None:
    """Needs neither cluster nor engine."""
    print(report.card(report.run(config)))


if __name__ == "__main__":
    cli.run(__doc__, job)
