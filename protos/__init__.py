"""The contract: what two processes must agree on byte for byte. Knows no torch, no sockets, no clock."""
