"""Rows out of files: JSONL, JSON arrays, gzip, Parquet and Arrow, local or behind any fsspec URL.

JSON lines are read by our own reader: a bad line is one dropped row with its file:line, whatever
its length. Rows come in source order, shards in name order. Everything streams but JSON documents.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_train.corpus.account import CorpusError, Unusable

LINES = (".jsonl", ".ndjson", ".json")
KNOWN = (*LINES, ".parquet", ".arrow")
NOT_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `where` it stands, and either its fields or why it has none."""

    where: str
    fields: dict[str, Any] | Unusable


def read_rows(sources: Sequence[str]) -> Iterator[Row]:
    """Every row of every source. Raises CorpusError for a source that is missing or not understood."""
    if not sources:
        raise CorpusError("corpus.sources is empty: name files, directories, globs or URLs")
    for filesystem, path in data_files(sources):
        yield from _rows(filesystem, path)


def fingerprint(sources: Sequence[str]) -> str:
    """Hash of what the sources hold: file contents, or what a remote store says of a file's version.

    Raises CorpusError as read_rows does.
    """
    total = hashlib.sha256()
    for filesystem, path in data_files(sources):
        if "file" in filesystem.protocol:
            with filesystem.open(path, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        else:
            total.update(str(filesystem.checksum(path)).encode())
    return total.hexdigest()[:16]


def data_files(sources: Sequence[str]) -> list[tuple[Any, str]]:
    """(filesystem, path) of every data file, in source order, each once. Raises CorpusError."""
    files = [file for source in sources for file in _files(source)]
    return list({path: (filesystem, path) for filesystem, path in files}.values())


def _files(source: str) -> list[tuple[Any, str]]:
    """(filesystem, path) of the data files behind one source, in name order."""
    filesystem, path = fsspec.core.url_to_fs(source)
    if filesystem.isdir(path):
        found = sorted(filesystem.find(path))
        paths = [name for name in found if _is_data(name, path)]
    elif filesystem.exists(path):
        found = paths = [path]
    else:
        found = sorted(filesystem.glob(path))
        paths = [name for name in found if not (_is_hidden(name) or filesystem.isdir(name))]
    if not found:
        empty = filesystem.isdir(path)
        problem = "is an empty directory" if empty else "does not exist; check the path or URL"
        raise CorpusError(f"corpus source {source} {problem}")
    unknown = [name for name in paths if not _suffix(name)]
    if not paths or unknown:
        raise CorpusError(
            f"corpus source {source}: no reader for {', '.join((unknown or found)[:5])}; "
            f"understood: {', '.join(KNOWN)}, each JSON kind also with .gz"
        )
    return [(filesystem, name) for name in paths]


def _is_data(name: str, root: str) -> bool:
    """Data files of a directory: known kinds, nothing hidden, no metadata of other tools."""
    parts = name[len(root) :].strip("/").split("/")
    return bool(_suffix(name)) and not any(map(_is_hidden, parts)) and parts[-1] not in NOT_DATA


def _is_hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith((".", "_"))


def _suffix(name: str) -> str:
    """The known suffix of a file name, .gz aside; empty for anything else."""
    plain = name.lower().removesuffix(".gz")
    return next((suffix for suffix in KNOWN if plain.endswith(suffix)), "")


def _rows(filesystem: Any, path: str) -> Iterator[Row]:
    suffix = _suffix(path)
    with filesystem.open(path, "rb", compression="infer") as file:
        try:
            if suffix == ".parquet":
                yield from _batches(path, pq.ParquetFile(file).iter_batches(batch_size=256))
            elif suffix == ".arrow":
                yield from _batches(path, _arrow_batches(file))
            elif suffix == ".json" and _is_document(file):
                yield from _document(path, file)
            else:
                yield from _lines(path, file)
        except pa.ArrowInvalid as error:
            raise CorpusError(f"{path} is not a readable {suffix} file: {error}") from error


def _lines(path: str, file: BinaryIO) -> Iterator[Row]:
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(BOM) if number == 1 else line
            if text.strip():
                yield Row(f"{path}:{number}", _parse(text))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Row(f"{path}:{number + 1}", Unusable("truncated_file", str(error)))


def _parse(line: bytes) -> dict[str, Any] | Unusable:
    """The JSON object on one line, or what is wrong with it."""
    try:
        return _fields(json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Unusable("invalid_utf8", str(error))
    except (ValueError, RecursionError) as error:
        return Unusable("invalid_json", str(error))


def _fields(value: Any) -> dict[str, Any] | Unusable:
    if isinstance(value, dict):
        return value
    return Unusable("not_an_object", f"got {type(value).__name__}")


def _document(path: str, file: BinaryIO) -> Iterator[Row]:
    """The rows of one JSON array, or the one row of one JSON object."""
    try:
        found = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{path} starts like one JSON array or object but is not: {error}"
        ) from error
    for number, value in enumerate(found if isinstance(found, list) else [found], start=1):
        yield Row(f"{path}:[{number}]", _fields(value))


def _is_document(file: BinaryIO) -> bool:
    """Whether the file is one array, or an object spread over lines; rewound."""
    head = file.read(4096).removeprefix(BOM).lstrip()
    file.seek(0)
    return head[:1] == b"[" or head.partition(b"\n")[0].strip() == b"{"


def _arrow_batches(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Record batches of an IPC file or stream (which `datasets` writes)."""
    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(file)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return iter(pa.ipc.open_stream(file))


def _batches(path: str, batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    rows = (
        row
        for batch in batches
        for start in range(0, len(batch), 256)
        for row in batch.slice(start, 256).to_pylist()
    )
    for number, row in enumerate(rows, start=1):
        yield Row(f"{path}:{number}", _without_nulls(row))


def _without_nulls(value: Any) -> Any:
    """Structs without their null fields: Arrow fills in every key that any other row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
