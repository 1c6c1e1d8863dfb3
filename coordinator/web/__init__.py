"""The operator's page, on the coordinator's side: login, sessions, the listed actions, and the log of actions. ADR 43."""
