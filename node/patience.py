"""The wait before a failed call is tried again: the first wait, and the longest."""

from __future__ import annotations

RETRY_SECONDS_MIN = 0.2
RETRY_SECONDS_MAX = 5.0
