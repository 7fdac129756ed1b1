"""Writes docs/config.md from the configuration schema (`make docs`)."""

from collections.abc import Iterator
from pathlib import Path

from eagle3_train.config import JobConfig, Section

HEAD = """# Configuration

Written by `make docs` from eagle3_train/config.py. A job is defaults, then `-c` files left to right, then
`section.field=value` overrides.

| key | default | meaning |
|---|---|---|
"""


def fields(model: type[Section] = JobConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, help) of every field, in order."""
    for name, info in model.model_fields.items():
        section = info.annotation
        if prefix == "" and isinstance(section, type) and issubclass(section, Section):
            yield from fields(section, f"{name}.")
        else:
            default = "required" if info.is_required() else str(info.default)
            yield f"{prefix}{name}", default, info.description or ""


def document() -> str:
    """The text of docs/config.md."""
    return HEAD + "".join(f"| `{key}` | {default} | {text} |\n" for key, default, text in fields())


if __name__ == "__main__":
    Path(__file__).with_name("config.md").write_text(document())
