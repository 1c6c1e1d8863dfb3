"""The decisions of the coordinator, as values and functions: no clock, no randomness, no sockets, no database."""
