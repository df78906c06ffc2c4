# SPDX-License-Identifier: Apache-2.0
"""A pointer of Git LFS in place of a large file is refused with what to type, for every reader."""

import pytest

from jaxmoe.checkpoint.tensor_files import find_tensors
from jaxmoe.config import ConfigError
from jaxmoe.data.sources import open_source
from jaxmoe.data.tokenizer import load_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
READERS = {
    "model.safetensors": lambda path: find_tensors(path.parent),
    "tokenizer.json": load_tokenizer,
    "rows.jsonl": open_source,
    "rows.parquet": open_source,
    "rows.jsonl.gz": open_source,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_of_git_lfs_is_named(name, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / name).write_text(POINTER)
    with pytest.raises(ConfigError, match="is a pointer of Git LFS") as error:
        READERS[name](folder / name if name.startswith("model") else str(folder / name))
    assert str(error.value).endswith(f"Type: git -C '{folder}' lfs pull")
