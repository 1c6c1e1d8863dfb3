"""The error tree. An error is named by whose fault it is, and says what to do.

SwarmentumError
|- OperatorError   the person running this program: a flag, a file, a setting      exit code 2
|- NetworkError    the network: unreachable, silent, too slow                      exit code 3
|- RefusedError    the other side said no, with its reason                         exit code 4
|- DivergedError   replicas differ where they must not                             exit code 5
|- StoppedError    the person running it stopped it                               exit code 130
`- Refusal         a stranger's bytes did not get through the door (never ends a program)
"""

from __future__ import annotations

import os
import re
import socket
from enum import Enum


class SwarmentumError(Exception):
    """Anything that this project raises on purpose."""

    exit_code = 1


class OperatorError(SwarmentumError, ValueError):
    """A wrong value that the person running this program gave. The text names the value, its place, and the expected one."""

    exit_code = 2


class NetworkError(SwarmentumError):
    """Something could not be reached in time."""

    exit_code = 3


class RefusedError(SwarmentumError):
    """The other side refused, and gave a reason."""

    exit_code = 4


class DivergedError(SwarmentumError):
    """Two replicas of one state differ."""

    exit_code = 5


class StoppedError(SwarmentumError):
    """Ctrl-C or SIGTERM came while something was waited for."""

    exit_code = 130


class Reason(Enum):
    """The reason why a stranger's bytes were refused; the label of the metric `swarmentum_refused_total`."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    WRONG_KIND = "wrong_kind"
    WRONG_RUN = "wrong_run"
    BAD_SIGNATURE = "bad_signature"
    UNKNOWN_SIGNER = "unknown_signer"
    WRONG_STEP = "wrong_step"
    WRONG_PARENT = "wrong_parent"
    REPLAYED = "replayed"
    EQUIVOCATED = "equivocated"
    WRONG_LAYOUT = "wrong_layout"
    OUT_OF_RANGE = "out_of_range"
    HASH_MISMATCH = "hash_mismatch"
    TOO_MANY = "too_many"


class Refusal(SwarmentumError):  # noqa: N818 - the door returns it as a verdict
    """Bytes from a stranger that did not get through the door: the reason for machines, the detail for people."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


# The error of the operator's data, in one class: the message names the file, the value and what to do.


class DataError(OperatorError):
    """The data that the operator named cannot be trained on."""


class TokenizerError(DataError):
    """The tokenizer that the run names cannot be loaded."""


_NUMBERED = re.compile(r"\[Errno (-?\d{1,4})\] (?:Connect call failed )?")
_EACH = "\n  * "
"""Before each address, with its reason, at which p2pd dialled in vain."""


def no_name(host: str, why: str) -> str:
    """Words for a host's name without an address, which the system's words leave out. `host`: empty if it stands beside."""
    return f"this machine finds no address of {host or 'that name'} ({why}): check the name, and this network's DNS"


def in_words(error: BaseException) -> str:
    """An error of the network on one line, without the system's numbers; a library's own may hide a failed look-up."""
    within = None if isinstance(error, SwarmentumError) else error  # ours say it already
    while within is not None:
        if isinstance(within, socket.gaierror):
            return no_name("", within.strerror or str(within))
        within = within.__cause__ or (None if within.__suppress_context__ else within.__context__)
    line = (str(error).replace(_EACH, "; ").splitlines() or [""])[0]
    line = line or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    return _NUMBERED.sub(lambda it: "" if it[0].endswith("] ") else f"{os.strerror(int(it[1]))} ", line)
