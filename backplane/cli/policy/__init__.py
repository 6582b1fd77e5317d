"""Commands about policies."""
