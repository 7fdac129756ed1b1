"""Will it work, and at what cost: `preflight.py -c FILE... [--depth static|plan|live] [--json FILE] [section.field=value ...]`."""

import argparse
import logging
import os
import sys
from pathlib import Path

from eagle3_train.rundir import write_atomic
from ray_jobs import cli


def main() -> int:
    """Print the checks; exit status 0 when nothing failed, 1 when something did, 2 for an unusable configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", choices=("static", "plan", "live"), default="plan")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    config, options = cli.parse(parser)
    from eagle3_train.stages import preflight

    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("eagle3_train").setLevel(logging.INFO)
    if options.depth == "live" and os.environ.get("RAY_ADDRESS"):
        cli.connect()
    report = preflight.run(config, options.depth, Path.cwd())
    if options.json:
        write_atomic(options.json, report.json())
    print(report.text())
    blocking = [check.name for check in report.blocking(config)]
    print(f"failed: {', '.join(blocking)}" if blocking else "nothing failed")
    return int(bool(blocking))


if __name__ == "__main__":
    sys.exit(main())
