"""The operator's page: HTTP for one operator's browser, in a process without keys (ADR 43).

`python -m node.operator_page.page_routes` passes requests on to the process that started it, which decides about each
(`coordinator/web`).
"""
