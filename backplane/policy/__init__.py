"""Decides what an agent may do: rules, patterns of paths and URLs, capabilities, approvals. Pure."""
