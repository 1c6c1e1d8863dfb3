"""How far the download of a state is: a rate that counts what came, and not what was on the disk before."""

from node.training.sync import TOLD_SECONDS, Loading


def test_rate_and_time_left_count_from_the_first_piece() -> None:
    loading = Loading()
    assert loading.came(400_000_000, 1_400_000_000, 100.0), "the log has the first"
    assert loading.words == "loading the state: 400 MB of 1.4 GB"
    assert not loading.came(500_000_000, 1_400_000_000, 100.0 + TOLD_SECONDS - 1)
    assert loading.words == "loading the state: 500 MB of 1.4 GB, 25 MB/s, 36 s left"
    assert loading.came(600_000_000, 1_400_000_000, 100.0 + TOLD_SECONDS)
    assert loading.came(1_400_000_000, 1_400_000_000, 120.0), "the log has the last"
    assert loading.words == "loading the state: 1.4 GB of 1.4 GB, 50 MB/s"
    loading.ended()
    assert loading.words == ""


def test_another_download_begins_anew() -> None:
    loading = Loading()
    loading.came(900, 1000, 0.0)
    assert loading.came(100, 2000, 50.0)
    assert loading.words == "loading the state: 100 B of 2.0 kB"
    loading.came(1100, 2000, 60.0)
    assert loading.words == "loading the state: 1.1 kB of 2.0 kB, 100 B/s, 9 s left"
