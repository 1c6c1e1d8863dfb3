"""`python -m coordinator`, but it waits for calls that are open at its end longer than any test waits for it.

A stop that is at once without a watch: whatever waits for that patience fails, however slow the machine is. Not a test:
tests/system/test_coordinator_process.py starts it.
"""

from coordinator.__main__ import main
from coordinator.serving import served_coordinator

if __name__ == "__main__":
    served_coordinator.STOP_SECONDS_MAX = 3600.0
    main()
