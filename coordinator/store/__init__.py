"""The parts that survive a crash: the journal and its checkpoints, the lease of several coordinators, runs read back."""
