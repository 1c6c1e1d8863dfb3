"""Generated from the .proto files beside it by `python -m protos.generate`; committed, never edited."""
