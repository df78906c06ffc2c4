# SPDX-License-Identifier: Apache-2.0
"""How much memory is left, from files as the kernel writes them."""

import pytest

from jaxmoe.distributed.host import count_free_bytes, use_one_thread_per_device


def write_files(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


MACHINE = {"proc/meminfo": "MemTotal:  90 kB\nMemFree: 2 kB\nMemAvailable:      50 kB\n"}


def test_nobody_says(tmp_path):
    assert count_free_bytes(tmp_path) is None


def test_without_a_limit_memory_is_the_machines(tmp_path):
    two = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}
    write_files(tmp_path, MACHINE | two)
    assert count_free_bytes(tmp_path) == 50 * 1024


@pytest.mark.parametrize("place", ["a/b", "a", ""])
def test_the_smallest_group_limits_memory_without_page_cache(tmp_path, place):
    top = f"sys/fs/cgroup/{place}".rstrip("/")
    write_files(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "0::/a/b\n",
            f"{top}/memory.max": "30000\n",
            f"{top}/memory.current": "28000\n",
            f"{top}/memory.stat": "anon 9\ninactive_file 500\n",
        },
    )
    assert count_free_bytes(tmp_path) == 2500


def test_the_first_version_of_groups_is_read_too(tmp_path):
    top = "sys/fs/cgroup/memory"  # in a container the path is the host's
    write_files(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "9:cpu:/\n4:memory:/docker/c0ffee\n0::/\n",
            f"{top}/memory.limit_in_bytes": "40000\n",
            f"{top}/memory.usage_in_bytes": "30000\n",
            f"{top}/memory.stat": "inactive_file 1\ntotal_inactive_file 700\n",
        },
    )
    assert count_free_bytes(tmp_path) == 10_700


def test_cpu_devices_get_a_thread_preserving_flags():
    environ = {"XLA_FLAGS": "--a=b"}
    use_one_thread_per_device(environ)
    use_one_thread_per_device(environ)
    assert environ == {"XLA_FLAGS": "--a=b --xla_cpu_multi_thread_eigen=false"}
    environ_set = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true"}
    use_one_thread_per_device(environ_set)
    assert environ_set == {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true"}
    none = {}
    use_one_thread_per_device(none)
    assert none == {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
