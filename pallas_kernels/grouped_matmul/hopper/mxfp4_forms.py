# SPDX-License-Identifier: Apache-2.0
"""How a Hopper kernel of four-bit weights divides a core's warpgroups and shared memory.

A form changes no digit: every sum has the same terms in the same order. A decoder takes about 250
instructions for a step and waits longer than that for loads, a fence and barriers; several decoders
wait at the same time. With few rows the bytes of codes in flight decide, so codes have a ring of
their own, deeper than the one of decoded tiles, whose slots are six times larger.

Next: pallas_gpu_mxfp4.py, which runs a form.
"""

from typing import NamedTuple


class Form(NamedTuple):
    """Warpgroups and rings of one kernel.

    The compiler wants 90 registers a thread at launch for products of 128 columns, so there are at
    most five warpgroups, with the one that fetches. They start with 96, and their total may not
    exceed 5·96.
    """

    consumers: int  # warpgroups that multiply, each with 64 rows
    decoders: int  # warpgroups that decode: step n is that of n mod `decoders`
    decoders_fetch_rows: bool  # each those of its steps; else the warpgroup that fetches codes
    stages: int  # slots of rows and decoded tiles, a multiple of `decoders`
    code_stages: int  # slots of codes, a multiple of `decoders`
    decoder_registers: int
    consumer_registers: int


# 192 rows; a slot has 40 KiB, one of codes 4. Three in flight cover 2300 cycles: the latency of
# memory and the decoding.
SINGLE_DECODER = Form(3, 1, False, 4, 4, 40, 136)
# 128 rows.
TWO_DECODERS = Form(2, 2, False, 4, 8, 72, 152)
# 64 rows; a slot has 24 KiB. At least nine slots of codes are in flight: 38 KiB a core.
FEW_ROWS = Form(1, 3, True, 6, 12, 88, 168)
FEW_ROWS_TWO_DECODERS = Form(1, 2, True, 6, 12, 88, 168)
FEW_ROWS_ONE_FETCHER = Form(1, 3, False, 6, 6, 88, 168)

_FEW, _MANY = FEW_ROWS, SINGLE_DECODER
_FEW_ROWS_A_GROUP = 64


def choose_form(n_rows: int, n_groups: int) -> Form:
    """The form for so many rows in so many groups."""
    return _FEW if n_rows <= _FEW_ROWS_A_GROUP * n_groups else _MANY
