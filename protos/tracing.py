"""One OpenTelemetry trace for each clock step, with spans of the coordinator and of peers (`--trace`). Changes no run. ADR 57.

All parties derive a step's trace id from the run id and the step, so no message carries it. Spans are recorded when they are
over. A thread of the SDK sends them from a bounded queue. Refuses to wait for the receiver, except END_SECONDS_MAX at the end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from protos.errors import OperatorError

PREFIX: Final = "swarmentum."
END_SECONDS_MAX: Final = 3.0
"""A program that ends waits so long for its last spans to be sent."""
WARNING_SECONDS: Final = 60.0
"""At most one warning about the receiver in this time."""
WARNING_CHARACTERS_MAX: Final = 500
_DOMAIN: Final = b"swarmentum trace 1\x00"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NANO: Final = 1_000_000_000

Value = str | int | float | bool
"""A value of a span's attribute."""
Span = tuple[float, float]
"""When a span began and ended, in seconds of the monotonic clock."""


def ids_of(run_id: bytes, step: int) -> tuple[int, int]:
    """The id of a step's trace (128 bits), and of its root span (64 bits). The coordinator records the root span."""
    digest = _digest(run_id, step)
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


def part_of(run_id: bytes, step: int, public_key: bytes) -> int:
    """The id of the span that holds one peer's part of a step (64 bits)."""
    return int.from_bytes(_digest(run_id, step, public_key)[:8], "big")


def _digest(run_id: bytes, step: int, public_key: bytes = b"") -> bytes:
    return hashlib.sha256(_DOMAIN + run_id + step.to_bytes(8, "big") + public_key).digest()


class Tracing:
    """Records the spans of one process. Any thread may record."""

    def __init__(self, service: str, instance: str, log: Any) -> None:
        """`service`: a name if OTEL_SERVICE_NAME gives none. `instance`: this process's own. Raises OperatorError."""
        _check_protocol()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise OperatorError(f"trace: {error}; pip install '.[trace]' in the folder of the repository") from error
        self._log, self._warnings = log, _Warnings(log)
        names = {"service.instance.id": instance}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            names["service.name"] = service
        self._ids = _Ids()
        self._provider: Any = TracerProvider(
            resource=Resource.create(names), id_generator=self._ids, shutdown_on_exit=False
        )
        try:
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        except ValueError as error:
            raise OperatorError(f"trace: a wrong value of an OTEL_ variable: {error}") from error
        self._tracer = self._provider.get_tracer("swarmentum")
        self._lock = threading.Lock()

    def root(self, run_id: bytes, step: int, name: str, span: Span, /, **values: Value) -> None:
        """Record the root span of a step's trace. `span`: when it began and ended, in seconds of the monotonic clock."""
        trace, own = ids_of(run_id, step)
        self._record(run_id, step, name, span, values, trace=trace, parent=None, own=own)

    def part(self, run_id: bytes, step: int, public_key: bytes, name: str, span: Span, /, **values: Value) -> None:
        """Record a peer's part of a step: a child of the root span."""
        trace, root = ids_of(run_id, step)
        own = part_of(run_id, step, public_key)
        self._record(run_id, step, name, span, values, trace=trace, parent=root, own=own)

    def child(
        self, run_id: bytes, step: int, public_key: bytes | None, name: str, span: Span, /, **values: Value
    ) -> None:
        """Record a span inside a peer's part; without a key, inside the root span."""
        trace, root = ids_of(run_id, step)
        parent = root if public_key is None else part_of(run_id, step, public_key)
        self._record(run_id, step, name, span, values, trace=trace, parent=parent, own=None)

    def _record(
        self,
        run_id: bytes,
        step: int,
        name: str,
        span: Span,
        values: Mapping[str, Value],
        *,
        trace: int,
        parent: int | None,
        own: int | None,
    ) -> None:
        own_values = {f"{PREFIX}{key}": value for key, value in values.items()}
        own_values |= {f"{PREFIX}run": run_id.hex()[:16], f"{PREFIX}step": step}
        try:
            self._send(name, span, own_values, trace, parent, own)
        except Exception as error:  # noqa: BLE001 - whatever a library does with a span, the run goes on
            self._warnings.tell(f"{type(error).__name__}: {error}")

    def _send(
        self, name: str, span: Span, values: Mapping[str, Value], trace: int, parent: int | None, own: int | None
    ) -> None:
        from opentelemetry import trace as api
        from opentelemetry.context import Context

        # The sampler sees the trace id alone, so all parties that share a ratio sample the same steps.
        if not self._provider.sampler.should_sample(None, trace, name).decision.is_sampled():
            return
        context = Context()
        if parent is not None:
            above = api.SpanContext(trace, parent, is_remote=True, trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED))
            context = api.set_span_in_context(api.NonRecordingSpan(above), context)
        # Both ends with one reading of the clocks: a span keeps its length when somebody sets the wall clock.
        offset = time.time_ns() - time.monotonic_ns()
        with self._lock:
            self._ids.trace, self._ids.span = trace, own
            made = self._tracer.start_span(
                name, context=context, start_time=offset + round(span[0] * _NANO), attributes=values
            )
        made.end(offset + round(max(span) * _NANO))

    def close(self) -> None:
        """Send the spans that wait, for END_SECONDS_MAX at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        thread.start()
        thread.join(END_SECONDS_MAX)
        if thread.is_alive():
            self._log.warning("the last spans are not sent: their receiver is too slow or does not answer")
        self._warnings.close()


def _check_protocol() -> None:
    for name in _PROTOCOLS:
        if value := os.environ.get(name):
            if value != "http/protobuf":
                raise OperatorError(
                    f"{name}={value}: this program sends http/protobuf alone, by default to port 4318; set that, or unset it"
                )
            return


class _Ids:
    """Gives the SDK the ids that a step's spans have; random ones for spans that nobody has to find."""

    trace = 0
    span: int | None = None

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        chosen, self.span = self.span, None
        return chosen or int.from_bytes(os.urandom(8), "big") or 1

    def is_trace_id_random(self) -> bool:
        return True


class _Warnings(logging.Handler):
    """Passes what the SDK says about its receiver on to our log, one line in WARNING_SECONDS."""

    def __init__(self, log: Any) -> None:
        super().__init__(logging.WARNING)
        self._log, self._next, self._more = log, 0.0, 0
        self._source = logging.getLogger("opentelemetry")
        self._before = self._source.propagate
        self._source.propagate = False
        self._source.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the SDK's threads."""
        self.tell(record.getMessage())

    def tell(self, why: str) -> None:
        """One line, unless the last one is too young."""
        now = time.monotonic()
        if now < self._next:
            self._more += 1
            return
        self._log.warning("traces: spans may be lost", why=why[:WARNING_CHARACTERS_MAX], more=self._more)
        self._next, self._more = now + WARNING_SECONDS, 0

    def close(self) -> None:
        self._source.removeHandler(self)
        self._source.propagate = self._before
        super().close()
