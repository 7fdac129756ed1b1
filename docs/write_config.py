"""Writes docs/config.md from the configuration schema (`make docs`)."""

from pathlib import Path

from eagle3_train.config import fields

HEAD = """# Configuration

Written by `make docs` from eagle3_train/config.py. A job is defaults, then `-c` files left to right, then
`section.field=value` overrides.

| key | default | meaning |
|---|---|---|
"""


def main() -> None:
    """Write the table."""
    rows = [f"| `{key}` | {default} | {text} |" for key, default, text in fields()]
    Path(__file__).with_name("config.md").write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
