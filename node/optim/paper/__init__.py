"""DeMo as its authors run it (arXiv 2411.19870v1): values with a magnitude, a mean over the senders, chunks by tensor."""
