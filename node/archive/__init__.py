"""The archive of a run: a peer keeps it (`--archive`), and `verify` and `ledger` prove the run from it."""
