"""A container's quota of CPU time counts as cores: both versions of cgroup, nested groups, and files that say nothing."""

import os
from pathlib import Path

import pytest

from protos.process import usable_cores

HERE = len(os.sched_getaffinity(0))


def system(folder: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    own, root = folder / "cgroup", folder / "fs"
    own.write_text(groups)
    root.mkdir()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return own, root


V1 = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}),
        ("0::/\n", {"cpu.max": "50000 100000\n"}),
        ("0::/docker/abc\n", {"cpu.max": "100000 100000\n"}),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "10000 10000\n"}),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "900000 100000\n"}),
        ("4:cpu,cpuacct:/d\n", {f"cpu,cpuacct/d/{V1[0]}": "100000\n", f"cpu,cpuacct/d/{V1[1]}": "100000\n"}),
        ("1:cpu:/d/e\n", {f"cpu/d/{V1[0]}": "25000\n", f"cpu/d/{V1[1]}": "100000\n"}),
        ("3:cpuacct,cpu:/gone\n0::/\n", {f"cpuacct,cpu/{V1[0]}": "100000\n", f"cpuacct,cpu/{V1[1]}": "100000\n"}),
        ("0::/../x\n", {"cpu.max": "100000 100000\n"}),
    ],
)
def test_a_quota_of_one_core_is_one_core(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    assert usable_cores(*system(tmp_path, groups, files)) == 1


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {}),
        ("", {"cpu.max": "max 100000\n"}),
        ("nonsense", {"cpu.max": "\n"}),
        ("1:cpu:/\n", {f"cpu/{V1[0]}": "-1\n", f"cpu/{V1[1]}": "100000\n"}),
        ("0::/\n", {"cpu.max": "0 0\n"}),
        ("0::/\n", {"cpu.max": f"{100_000 * (HERE + 3)} 100000\n"}),
    ],
)
def test_without_a_quota_the_affinity_counts(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    assert usable_cores(*system(tmp_path, groups, files)) == HERE
    assert usable_cores(tmp_path / "none", tmp_path / "none") == HERE


@pytest.mark.skipif(HERE < 2, reason="needs two cores")
def test_a_part_of_a_core_counts_as_one_more(tmp_path: Path) -> None:
    assert usable_cores(*system(tmp_path, "0::/\n", {"cpu.max": "150000 100000\n"})) == 2
