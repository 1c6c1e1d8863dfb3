"""A receiver of OpenTelemetry traces for tests: a small HTTP server that reads OTLP's protobuf, as a collector does."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Takes spans over HTTP, as an OpenTelemetry collector does. `spans`: (service, instance, span)."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

        self.spans = list[tuple[str, str, Any]]()
        received = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {it.key: it.value.string_value for it in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        who = names["service.name"], names["service.instance.id"]
                        received.extend((*who, span) for span in scope.spans)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(service.ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def of(self, trace: int) -> list[tuple[str, str, Any]]:
        """The spans of one trace."""
        return [it for it in list(self.spans) if int.from_bytes(it[2].trace_id, "big") == trace]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(span: Any) -> dict[str, Any]:
    found = {it.key.removeprefix("swarmentum."): it.value for it in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in found.items()}
