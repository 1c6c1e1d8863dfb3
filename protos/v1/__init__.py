"""Generated from the .proto files beside it by `python -m tests.house.generate_protos`; committed, never edited."""
