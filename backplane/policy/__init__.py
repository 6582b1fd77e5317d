"""Policy: rules, patterns of paths and URLs, capabilities, approvals. Pure."""
