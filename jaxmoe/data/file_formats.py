# SPDX-License-Identifier: Apache-2.0
"""Read the records of one file: JSON, JSON lines, CSV, TSV, parquet and Arrow.

Next: jaxmoe/data/task_files.py finds the files.
"""

import codecs
import csv
import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json, reject_duplicate_keys
from jaxmoe.config.lfs_pointer import check_no_lfs_pointer

Records = Iterator[tuple[str, Any]]  # ("file:line", record), counted from 1


def readers_by_suffix() -> dict[str, Callable[[Path], Records]]:
    """The reader of each format, by the end of the file's name."""
    packed = {".jsonl": _iter_jsonl, ".json": _iter_json, ".csv": _iter_csv, ".tsv": _iter_csv}
    return {
        **packed,
        **{f"{suffix}.gz": reader for suffix, reader in packed.items()},
        ".parquet": _iter_parquet,
        ".arrow": _iter_arrow,
    }


def format_suffix(path: Path) -> str:
    """The end of a file's name that tells its format, such as ".jsonl" or ".jsonl.gz".

    Capital letters do not matter.
    """
    suffix = path.suffix.lower()
    return "".join(path.suffixes[-2:]).lower() if suffix == ".gz" else suffix


def read_records(path: Path) -> Records:
    """All records of a file with one of these suffixes. Raises ConfigError if it is malformed."""
    check_no_lfs_pointer(path)
    return readers_by_suffix()[format_suffix(path)](path)


def _read_bytes(path: Path) -> bytes:
    """The decompressed bytes of a file, without the byte order mark that Windows editors write."""
    content = path.read_bytes()
    if path.suffix.lower() == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path} must be a gzip file; {error}. Copy it again.") from error
    return content.removeprefix(codecs.BOM_UTF8)


def _iter_json(path: Path) -> Records:
    """The elements of an array."""
    try:
        rows = parse_json(_read_bytes(path).decode("utf-8"), reject_duplicate_keys)
    except ValueError as error:
        raise ConfigError(
            f"{path} must be one JSON array in UTF-8; {error}. Name a file with one object per "
            "line .jsonl."
        ) from error
    if not isinstance(rows, list):
        raise ConfigError(
            f"{path} must be one JSON array of objects, got {type(rows).__name__}. "
            "Write [{...}, {...}], or a .jsonl file with one object per line."
        )
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def _iter_jsonl(path: Path) -> Records:
    """The value of each line that is not blank."""
    # Split as bytes, because a line separator of Unicode inside a text does not end a line of JSON.
    for line, raw in enumerate(_read_bytes(path).split(b"\n"), start=1):
        if not raw.strip():
            continue
        location = f"{path}:{line}"
        try:
            yield location, parse_json(raw.decode("utf-8"), reject_duplicate_keys)
        except ValueError as error:  # of JSON or of UTF-8
            raise ConfigError(
                f"{location} must be one JSON object in UTF-8; {error}. "
                f"Correct it, or delete the line: sed -i {line}d {path}"
            ) from error


def _iter_csv(path: Path) -> Records:
    """The rows below the header as dicts of texts, each with the line where it begins."""
    try:
        text = _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} must be in UTF-8; {error}. Try iconv -f latin1 -t utf-8 {path} > utf8.csv"
        ) from error
    lines = _split_csv(path, text)
    header_line, header = lines[0] if lines else (1, [])
    if "" in header or len(set(header)) < len(header):
        raise ConfigError(
            f"{path}:{header_line} must name each column once, got {', '.join(header)!r:.200}. "
            "Write the names of the columns into the first line."
        )
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            raise ConfigError(
                f"{path}:{line} must have {len(header)} cells, one for each column of the first "
                f"line, got {len(cells)}. Put double quotes around a cell with a separator or a "
                "line break in it."
            )
        yield f"{path}:{line}", dict(zip(header, cells, strict=True))


def _split_csv(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """(line, cells) of each row that is not blank."""
    # Strict, because a quote that is never closed would otherwise swallow the rest of the file.
    reader = csv.reader(
        io.StringIO(text, newline=""),
        strict=True,
        delimiter="\t" if format_suffix(path).startswith(".tsv") else ",",
    )
    rows, line = [], 1
    # Python refuses cells of more than 131,072 characters unless this limit of the process is set.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        for cells in reader:
            if cells:
                rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(
            f"{path}:{line} must be cells with separators between them; {error}. Double each "
            "double quote inside a quoted cell, and close it with one."
        ) from error
    finally:
        csv.field_size_limit(limit)
    return rows


def _iter_parquet(path: Path) -> Records:
    """The rows of a parquet file."""
    parquet = _import_pyarrow("pyarrow.parquet", path)
    yield from _iter_table(path, "parquet", lambda: parquet.ParquetFile(path).read())


def _iter_arrow(path: Path) -> Records:
    """The rows of an Arrow stream, which datasets' save_to_disk writes, or of an Arrow file."""
    ipc = _import_pyarrow("pyarrow.ipc", path)

    def read() -> Any:
        with open(path, "rb") as file:
            is_stream = file.read(6) != b"ARROW1"
            file.seek(0)
            return (ipc.open_stream if is_stream else ipc.open_file)(file).read_all()

    yield from _iter_table(path, "Arrow", read)


def _import_pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f'{path} needs pyarrow, which is not installed. Type: pip install "jaxmoe[parquet]"'
        ) from error


def _iter_table(path: Path, kind: str, read: Callable[[], Any]) -> Records:
    try:
        rows = read().to_pylist()
    # pyarrow's own errors, and any error of values that have no Python type (times, numbers)
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
        raise ConfigError(
            f"{path} must be {'an' if kind == 'Arrow' else 'a'} {kind} file whose columns Python "
            f"can read; {reason}. Write it again without the columns that are not needed."
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row
