"""The web page of runs: a process that reads runs over gRPC like anybody, and shows them to browsers over HTTP.

It holds no key and imports no torch, no hivemind and nothing of the coordinator. ADR 43.
"""
