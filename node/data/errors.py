"""The error of the operator's data, in one class: the message names the file, the value and what to do."""

from protos.errors import OperatorError


class DataError(OperatorError):
    """The data that the operator named cannot be trained on."""


class TokenizerError(DataError):
    """The tokenizer that the run names cannot be loaded."""
