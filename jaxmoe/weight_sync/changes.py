# SPDX-License-Identifier: Apache-2.0
"""The values of an array that changed, as bytes: which ones, and their new values.

An update of RL changes few of the weights that are sent, since they are rounded: a step of 1e-6
moves about one value in fifty over the border of its bfloat16. A block of changes is a bitmap of
the changed words, compressed, then the words themselves; where that is not shorter, it is the
block's bytes as they are. It has no digest: that of the complete result is
checked. Numpy alone, because vLLM's processes read it too. Next: sent_weights.py writes blocks,
jaxmoe/vllm/plugin/received_bytes.py applies them.
"""

import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FILE = "changes.bin"  # the blocks of an update, one after the other
INDEX_FILE = "changes.json"  # {"files": {name: [the fields of Block, ...]}}
# Changed words are scattered, so that a search for longer matches only takes time.
_ZLIB_LEVEL = 1
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Block(NamedTuple):
    """Position of a block of changes: `nbytes` of a tensor from its byte `begin`."""

    tensor: str
    begin: int
    nbytes: int
    mask_nbytes: int  # of the compressed bitmap; 0: the block's bytes follow as they are
    changed_nbytes: int  # of the words after the bitmap


def encode_block(
    old: NDArray[np.uint8], new: NDArray[np.uint8], itemsize: int
) -> tuple[bytes, NDArray[np.uint8]]:
    """Return (compressed bitmap, new words) of the words of `itemsize` bytes that differ.

    Both are empty if none does. The bitmap is empty, and the words all, if that is shorter.
    """
    words = new.view(_WORDS[itemsize])
    differ = words != old.view(_WORDS[itemsize])
    n_changed = int(np.count_nonzero(differ))
    if n_changed == 0:
        return b"", new[:0]
    mask = zlib.compress(np.packbits(differ).data, _ZLIB_LEVEL)
    if len(mask) + n_changed * itemsize >= new.size:
        return b"", new
    return mask, words[differ].view(np.uint8)


def apply_block(
    block: NDArray[np.uint8], mask: bytes, changed: NDArray[np.uint8], itemsize: int
) -> None:
    """Write changed words into a block of old bytes, in place.

    Raises ValueError if bitmap and words do not fit the block.
    """
    words = block.view(_WORDS[itemsize])
    new = changed.view(_WORDS[itemsize])
    if not mask:
        if new.size != words.size:
            raise ValueError(f"{new.size} words for a block of {words.size}")
        words[:] = new
        return
    n_bytes = -(-words.size // 8)
    try:
        # A damaged bitmap could otherwise expand to gigabytes.
        decoder = zlib.decompressobj()
        bitmap = decoder.decompress(mask, n_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"a damaged bitmap ({error})") from error
    if len(bitmap) != n_bytes or not decoder.eof:
        raise ValueError(f"a bitmap of {len(bitmap)} bytes, not {n_bytes}, or cut off")
    differ = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=words.size).view(bool)
    if int(np.count_nonzero(differ)) != new.size:
        raise ValueError(f"{new.size} words for {int(np.count_nonzero(differ))} changes")
    words[differ] = new
