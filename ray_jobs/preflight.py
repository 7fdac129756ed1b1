"""Will it work, and at what cost: `preflight.py -c FILE... [--depth static|plan|live] [--json FILE] [section.field=value ...]`."""

import argparse
import logging
import os
import sys
from pathlib import Path

from eagle3_train.config_file import load_config
from eagle3_train.rundir import write_atomic
from ray_jobs import cli


def main() -> int:
    """Print the checks; exit status 0 when nothing failed, 1 when something did, the configuration included."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", choices=("static", "plan", "live"), default="plan")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    options, files, overrides = cli.arguments(parser)
    from eagle3_train.stages import preflight

    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("eagle3_train").setLevel(logging.INFO)
    try:
        config = load_config(files, overrides)
    except ValueError as error:
        report = preflight.unusable(str(error))
    else:
        if options.depth != "static" and os.environ.get("RAY_ADDRESS"):
            cli.connect()
        report = preflight.run(config, options.depth, Path.cwd())
    print(report.text())
    print(report.summary())
    if options.json:
        try:
            write_atomic(options.json, report.json())
        except OSError as error:
            raise SystemExit(f"error: --json {options.json} cannot be written: {error}") from error
    return int(bool(report.blocking))


if __name__ == "__main__":
    sys.exit(main())
