"""The commands of `swarmentum`, and the questions before a run may use a machine."""
