"""The parts that survive a crash: the journal and its checkpoints, runs read back, lines before full runs."""
