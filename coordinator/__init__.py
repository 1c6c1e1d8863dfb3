"""The coordinator: the clock and the log of a run. Knows no torch and never sees a weight. See docs/architecture.md."""
