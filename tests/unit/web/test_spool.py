"""The log on the disk: the bytes that came in go out, page by page."""

from collections.abc import Iterator

import pytest

from node.web.followed import PAGE_BYTES_MAX, PAGE_ENTRIES_MAX, Spool, SpoolFullError


@pytest.fixture
def spool() -> Iterator[Spool]:
    made = Spool()
    yield made
    made.close()


def records(page: bytes) -> list[bytes]:
    found = []
    while page:
        size = int.from_bytes(page[:4], "big")
        found.append(page[4 : 4 + size])
        page = page[4 + size :]
    return found


def test_pages_have_every_entry_once_and_in_order(spool: Spool) -> None:
    entries = [bytes([number % 256]) * (number % 97) for number in range(1, 3 * PAGE_ENTRIES_MAX)]
    for data in entries:
        spool.append(data)
    found, first = [], 1
    while first <= spool.head:
        page, last, full = spool.page(first)
        assert full == (last - first + 1 == PAGE_ENTRIES_MAX)
        found += records(page)
        first = last + 1
    assert found == entries
    assert spool.page(first) == (b"", first - 1, False)


def test_a_page_has_bytes_of_at_most_its_limit_but_always_one_entry(spool: Spool) -> None:
    for size in (PAGE_BYTES_MAX // 2, PAGE_BYTES_MAX // 3, PAGE_BYTES_MAX // 3, PAGE_BYTES_MAX + 5, 1):
        spool.append(bytes(size))
    assert spool.page(1)[1:] == (2, True)
    assert spool.page(3)[1:] == (3, True)
    assert spool.page(4)[1:] == (4, True)
    assert spool.page(5)[1:] == (5, False)


def test_a_full_spool_refuses_and_keeps_what_it_has() -> None:
    spool = Spool(bytes_max=20)
    spool.append(b"0123456789")
    with pytest.raises(SpoolFullError, match="20 bytes"):
        spool.append(b"0123456789")
    assert records(spool.page(1)[0]) == [b"0123456789"]
    spool.close()
