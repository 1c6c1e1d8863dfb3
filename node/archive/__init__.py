"""The archive of a run: what a peer keeps (`--archive`), and what `verify` and `ledger` prove from it."""
