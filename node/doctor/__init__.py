"""What `swarmentum doctor` finds out about a machine: probes collect facts, pure functions turn facts into lines."""
