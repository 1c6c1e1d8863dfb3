"""The live parts of a coordinator: one runtime for each run, the gRPC services behind their gate, elections, metrics."""
