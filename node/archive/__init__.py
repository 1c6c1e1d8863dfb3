"""The archive of a run: a peer keeps it (setting `archive`), and `verify` and `ledger` prove the run from it."""
